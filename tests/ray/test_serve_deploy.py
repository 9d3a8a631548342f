"""`serve deploy` with the shipped file, on a Ray that somebody else has started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.ray.stage import eventually, free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
ALONE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",  # what the stage's own Ray was started with is not meant for this one
}


@pytest.fixture
def dashboard() -> Iterator[str]:
    """A head node with its dashboard, which is what `serve deploy` talks to; it ends with its process."""
    folder, port = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp")), free_port()
    command = [
        *(TOOLS / "ray", "start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"),
        *(f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"),
    ]
    head = subprocess.Popen(command, env={**os.environ, **ALONE}, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(f"http://127.0.0.1:{port}/api/serve/applications/"), 60)
        yield f"http://127.0.0.1:{port}"
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


def test_the_shipped_file_deploys_a_service_that_answers(dashboard: str, tiny_model: Path, tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "deploy" / "configs" / "serve.yaml").read_text(encoding="utf-8"))
    shipped["http_options"]["port"] = port = free_port()
    shipped["applications"][0]["args"] |= {"model": str(tiny_model), "kv_memory": "16MiB", "served_model_names": "tiny"}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(shipped))
    deploy = [TOOLS / "serve", "deploy", file, "-a", dashboard]
    done = subprocess.run(deploy, cwd=ROOT, env={**os.environ, **ALONE}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: answers(f"http://127.0.0.1:{port}/health"), 120)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
