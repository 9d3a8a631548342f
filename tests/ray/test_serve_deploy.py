"""`serve deploy` with the shipped file, on a Ray that somebody else has started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ray.head import ALONE, TOOLS, a_head, answers
from tests.ray.stage import eventually, free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The address of a dashboard, which is what `serve deploy` talks to."""
    with a_head() as head:
        yield head.dashboard


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
