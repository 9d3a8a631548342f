"""`tidegate serve` as a person runs it: up, asked, interrupted; and nothing of it is left. Minutes: with --all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.ray.launch import ROOT, serving
from tests.ray.stage import command_line, eventually, free_port

pytestmark = pytest.mark.slow


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def assert_nothing_left(folder: Path, started: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not alive
    assert not list((folder / "t").glob("tidegate-*"))
    assert not list((folder / "cache" / "run").glob("*.json"))


def test_a_service_answers_shows_its_status_and_ends_without_a_trace(folder: Path, tiny_model: Path) -> None:
    with serving(folder, tiny_model) as (process, port):
        eventually(lambda: is_up(port), 180)
        eventually(lambda: list((folder / "cache" / "run").glob("*.json")), 20)
        assert list((folder / "t").glob("tidegate-*")), "where its files lie while it runs"
        started = below(process)
        environment = {**os.environ, "TIDEGATE_CACHE": str(folder / "cache")}
        environment.pop("RAY_AUTH_MODE", None)
        command = [sys.executable, "-m", "deploy", "status", "--json"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["url"] == f"http://127.0.0.1:{port}"
        assert [group["state"] for group in found["groups"]] == ["up"]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data:")
            os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: to everything on the terminal
            assert process.wait(60) in (0, 130)
        assert_nothing_left(folder, started)


def test_an_interrupt_while_it_starts_leaves_nothing_either(folder: Path, tiny_model: Path) -> None:
    with serving(folder, tiny_model) as (process, _):
        eventually(lambda: any("ServeReplica" in command_line(child) for child in below(process)), 120)
        started = below(process)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        assert_nothing_left(folder, started)


def test_a_killed_launcher_takes_its_ray_with_it(folder: Path, tiny_model: Path) -> None:
    with serving(folder, tiny_model) as (process, port):
        eventually(lambda: is_up(port), 180)
        started = below(process)
        process.kill()
        # Ray's two agents of the node notice by themselves, within two minutes; nothing else may be there so long.
        _, alive = psutil.wait_procs([child for child in started if "Agent" not in child.name()], timeout=30)
        assert not alive


def test_a_busy_port_is_refused_before_anything_starts(folder: Path, tiny_model: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with serving(folder, tiny_model, "--port", str(port)) as (process, _):
            assert process.wait(60) == 1
            assert process.stdout is not None and f"cannot listen on 127.0.0.1:{port}" in process.stdout.read()
        assert not list((folder / "t").iterdir())
