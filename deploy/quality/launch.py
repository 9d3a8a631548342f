"""Launch: a trial in a process of its own, heard while it runs. Loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.quality.job import Job

Say = Callable[[str], None]
Run = Callable[[Job, Say], dict[str, Any]]

PROGRAM = (sys.executable, "-m", "deploy.quality.trial")
_TOLD = 1500


class TrialError(ValueError):
    """Nothing was measured; the message says why."""


def run_trial(job: Job, say: Say, program: Sequence[str] = PROGRAM) -> dict[str, Any]:
    """What `deploy.quality.trial` makes of `job`; `say` gets its progress as it comes. Raises TrialError. The process
    is gone when this returns or raises."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as given:
                given.write(json.dumps(job.plain))
            found = _hear(process.stdout, say)
            code = process.wait()
        except BrokenPipeError:
            found, code = None, process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if found is None:
            errors.seek(0)
            told = errors.read().strip()[-_TOLD:]
            raise TrialError(f"the trial of the KV precision ended with status {code}:\n{told}")
        return found


def _hear(lines: Iterable[str], say: Say) -> dict[str, Any] | None:
    """The result among what a trial prints; None where there is none. Raises TrialError for a fault."""
    result: dict[str, Any] | None = None
    for line in lines:
        message = json.loads(line)
        if "say" in message:
            say(message["say"])
        elif "fault" in message:
            raise TrialError(message["fault"])
        else:
            result = message["result"]
    return result
