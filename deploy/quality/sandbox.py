"""A sandbox for Python that a model has written: a process with limits, in a folder of its own, without a network where
the system lets us take it away.

The process leads a group of its own and, where namespaces are to be had, lives in one of processes, so that nothing of
it is left behind. It is no wall against malice: it runs as the user who starts it, and may read what that user may.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS = 10.0
MEMORY = 2**30
FILE = 2**22
FILES, PROCESSES = 32, 16
_UNSHARE = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--")
_TOLD = 400

_START = f"""
import resource, sys
for kind, most in (("CPU", int(sys.argv[2])), ("AS", {MEMORY}), ("FSIZE", {FILE}), ("NOFILE", {FILES}),
                   ("NPROC", {PROCESSES}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
path = sys.argv[1]
with open(path) as source:
    code = compile(source.read(), path, "exec")
exec(code, {{"__name__": "__main__"}})
"""
"""Limits are set in the process itself, before it reads a line of the program."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a program ran to its end; if not, what it said last, or that its time was up."""

    passed: bool
    said: str = ""


def passes(program: str, *, seconds: float = SECONDS) -> Outcome:
    """Run `program` for `seconds` at most, of the wall's clock and of the CPU's."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="tidegate-answer-") as folder:
        path = Path(folder) / "answer.py"
        # Who leaves early, by sys.exit(0) as much as by an exception, does not get here.
        path.write_text(f"{program}\nprint({mark!r})\n", encoding="utf-8", errors="replace")
        with (Path(folder) / "said").open("w+b") as said:
            process = subprocess.Popen(
                [*isolation(), sys.executable, "-I", "-S", "-c", _START, str(path), str(max(1, round(seconds)))],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"was not done within {seconds:g} s")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            text = said.read(FILE).decode(errors="replace").rstrip()
    return Outcome(True) if code == 0 and text.endswith(mark) else Outcome(False, text[-_TOLD:] or f"ended with {code}")


@cache
def isolation() -> tuple[str, ...]:
    """What stands before a command to take its network away and to end all its processes with it; () where the system
    does not allow it."""
    program = shutil.which("unshare")
    if program is None:
        return ()
    command = (program, *_UNSHARE)
    tried = subprocess.run([*command, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    return command if tried.returncode == 0 else ()
