"""A head node with its dashboard, as an operator starts it: `ray start --head`, on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.ray.stage import eventually, free_port

TOOLS = Path(sys.executable).parent
ALONE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",  # what the stage's own Ray was started with is not meant for this one
}


@dataclass(frozen=True)
class Head:
    """`dashboard` is its URL; `folder` holds its sessions; `process` is the one that all others of it descend from."""

    dashboard: str
    folder: Path
    process: psutil.Process


@contextmanager
def a_head(**environment: str) -> Iterator[Head]:
    """It ends with the context, with all its processes. `environment` is what they are told besides."""
    folder, port = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp")), free_port()
    command = [
        *(TOOLS / "ray", "start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"),
        # Its usual one may be another Ray's, and then no agent of this one takes jobs.
        f"--dashboard-agent-listen-port={free_port()}",
        *(f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"),
    ]
    told = {**os.environ, **ALONE, **environment}
    head = subprocess.Popen(command, env=told, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(f"http://127.0.0.1:{port}/api/serve/applications/"), 60)
        yield Head(f"http://127.0.0.1:{port}", folder, psutil.Process(head.pid))
    finally:
        started = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # `ray start --block` itself takes no notice of SIGTERM
        head.wait(10)
        _, alive = psutil.wait_procs(started, timeout=20)
        shutil.rmtree(folder, ignore_errors=True)
    assert not alive


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
