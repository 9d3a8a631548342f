"""`tidegate serve` as a process, started as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ray.stage import free_port

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """`command` in a session of its own, in the project's folder, all that it says on one pipe; killed at last."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(
    folder: Path, tiny_model: Path, *more: str, through: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`tidegate serve` in a session of its own, with its temporary folder and cache below `folder`; the words `through`
    stand before the command."""
    port = free_port()
    config = folder / "config.yaml"
    config.write_text(
        f"model: {tiny_model}\nserved_model_names: tiny\ndevice: cpu\ndtype: fp32\nthreads: 1\nport: {port}\n"
        "kv_memory: 16MiB\nmax_model_len: 4096\ndrain_s: 5\n"
    )
    (folder / "t").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "t"), "TIDEGATE_CACHE": str(folder / "cache")}
    environment.pop("RAY_AUTH_MODE", None)
    command = [*through, sys.executable, "-m", "deploy", "serve", "--config", str(config), *more]
    with started(command, environment) as process:
        yield process, port
