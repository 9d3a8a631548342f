"""A server that a benchmark starts and ends: a command, an address that answers once it is up, a log to look into.

Knows of the server only that it is asked for its models; the command is run as it stands, by no shell.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from deploy.bench.client import ServerError

READY_S, STOP_S = 600.0, 90.0
"""How long a server may take to answer, and to end by itself."""
_LOOK_S = 0.25
_SAID = 1500


def command_words(text: str, here: Path) -> list[str]:
    """`text` as words: "tidegate" as the program, also behind `env NAME=value …`, is this very one; {here} is the
    folder `here`, ~ one's home. Raises ServerError for quotes that do not close, or nothing at all."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ServerError(f"not a command: {text!r}: {error}") from error
    if not words:
        raise ServerError("not a command: nothing stands there")
    words = [os.path.expanduser(word.replace("{here}", str(here))) for word in words]
    program = next((i for i, word in enumerate(words) if word != "env" and "=" not in word), 0)
    if words[program] == "tidegate":
        words[program : program + 1] = [sys.executable, "-m", "deploy"]
    return words


class StartedServer:
    """Use as a context manager: inside it the server answers at `url`; behind it nothing of it is left. `pid` is its
    first process. Raises ServerError, with the end of what it said, when it does not come up within `ready_s`."""

    def __init__(self, command: str, url: str, *, here: Path, ready_s: float = READY_S, stop_s: float = STOP_S) -> None:
        self.url = url
        self._words = command_words(command, here)
        self._ready_s = ready_s
        self._stop_s = stop_s
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def __enter__(self) -> StartedServer:
        if answers(self.url):
            raise ServerError(f"{self.url}: a server is there already; end it, or give it another port")
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ServerError(f"{self._words[0]} cannot be run: {error.strerror or error}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ask it to end, then see to it that nothing of its process group is left."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._stop_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self._log is not None
        self._log.close()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + self._ready_s
        while not answers(self.url):
            if (status := self._process.poll()) is not None:
                raise ServerError(f"{shlex.join(self._words)} ended with status {status}:\n{self._said()}")
            if time.monotonic() > until:
                raise ServerError(f"{self.url}: no answer after {self._ready_s:g} s; the server said:\n{self._said()}")
            time.sleep(_LOOK_S)

    def _said(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-_SAID:]


def answers(url: str) -> bool:
    """Whether the server at `url` names a model and does not say that it is not ready."""
    try:
        models = json.loads(_get(f"{url}/v1/models"))
        return bool(models["data"]) and _is_well(url)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def counters(url: str, names: tuple[str, ...]) -> dict[str, float]:
    """Those of the server's Prometheus metrics, each summed over its labels; 0 for what it does not have."""
    found = dict.fromkeys(names, 0.0)
    if not names:
        return found
    try:
        lines = _get(f"{url}/metrics").decode(errors="replace").splitlines()
    except OSError as error:
        raise ServerError(f"{url}/metrics does not answer: {error}") from error
    for line in lines:
        name, _, value = line.replace("{", " {", 1).partition(" ")
        if name in found:
            with suppress(ValueError):
                found[name] += float(value.rpartition("}")[2].split()[0])
    return found


def _is_well(url: str) -> bool:
    """A server without /health is taken at its word."""
    try:
        _get(f"{url}/health")
    except urllib.error.HTTPError as error:
        return error.code < 500
    return True


def _get(address: str) -> bytes:
    """Past any proxy: what a benchmark asks stands on this machine or next to it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=5.0) as response:
        body: bytes = response.read()
    return body
