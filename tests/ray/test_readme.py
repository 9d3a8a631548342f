"""README's two commands are the ones that are tested: this runs the first, `tests/run` runs this."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.ray.launch import ROOT, started
from tests.ray.stage import free_port


def commands() -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Two commands")[1].split("\n## ")[0]
    return re.findall(r"^    (\./\S+)$", section, re.MULTILINE)


def test_readme_shows_the_two_commands_and_ci_calls_the_second() -> None:
    assert commands() == ["./deploy/quickstart", "./tests/run"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands())
    assert "./tests/run --all" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@contextmanager
def quickstart(port: int) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    with started([commands()[0], "--port", str(port)], environment) as process:
        yield process


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            return "".join(lines)
    raise AssertionError(f"quickstart ended early:\n{''.join(lines)}")


def python_snippet(text: str) -> str:
    return text[text.index("from openai import") : text.index("flush=True)") + len("flush=True)")]


@pytest.mark.slow
def test_quickstart_answers_shows_what_works_and_leaves_nothing() -> None:
    port = free_port()
    with quickstart(port) as process:
        text = read_until(process, "Ctrl-C lets running answers end")
        assert re.search(r"packages .*\n(.*\n)*  model .*\n  Ray ", text), "what is downloaded, and where to"
        assert re.search(r"\d+ tokens, over HTTP", text)
        curl = next(line for line in text.splitlines() if line.startswith("curl "))
        streamed = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120).stdout
        assert streamed.count("data: [DONE]") == 1 and '"content"' in streamed
        snippet = [sys.executable, "-c", python_snippet(text)]
        answer = subprocess.run(snippet, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        rest = read_until(process, "draining and stopping (")
        assert "Traceback" not in rest
        assert process.wait(60) in (0, 130)
        _, alive = psutil.wait_procs(started, timeout=15)
        assert not alive
