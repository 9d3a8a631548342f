"""`tidegate summarize` as a real Ray job: killed at random moments, its folder deleted, its input changed, submitted
again; its results brought back; its service found. The model is a server of the test's own, but for the last one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.job_submission import JobSubmissionClient
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.jobs import discovery
from deploy.jobs.records import mark_of
from tests.batch_server import BatchServer, about
from tests.ray.head import ALONE, TOOLS, Head, a_head
from tests.ray.stage import Stage, command_line, eventually

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS, KILLS, SEED = 60, 5, 11


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """On its node the program is on the path, as where it is installed."""
    script = tmp_path_factory.mktemp("bin") / "tidegate"
    script.write_text(f'#!/bin/sh\nexec {TOOLS}/python -m deploy "$@"\n')
    script.chmod(0o755)
    with a_head(PATH=f"{script.parent}:{TOOLS}:{os.environ['PATH']}", PYTHONPATH=str(ROOT)) as head:
        yield head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's working folder, with its input. No two are alike: Ray unpacks a folder that it knows only once, and fails
    where somebody has deleted it since."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "unlike").write_text(str(tmp_path))
    rows = ({"id": f"d{n}", "text": f"document number {n} is here"} for n in range(DOCUMENTS))
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def submit(head: Head, folder: Path, *words: str) -> str:
    """`ray job submit`: the job."""
    given = ["job", "submit", "--address", head.dashboard, "--working-dir", ".", "--no-wait"]
    command = [str(TOOLS / "ray"), *given, "--", "tidegate", "summarize", "--input", "docs.jsonl", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **ALONE}, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return "raysubmit_" + text.partition("raysubmit_")[2][:16]


def ended(client: JobSubmissionClient, job: str) -> str | None:
    status = client.get_job_status(job)
    return str(status.value) if status.is_terminal() else None


def whole_lines(output: Path) -> list[bytes]:
    lines = output.read_bytes().splitlines(keepends=True) if output.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def drivers(head: Head) -> list[psutil.Process]:
    """The processes of jobs' programs, beneath the head."""
    found = head.process.children(recursive=True)
    return [one for one in found if "python -m deploy summarize" in command_line(one)]


def delete_unpacked(head: Head) -> None:
    """The folders that Ray has unpacked for its jobs."""
    found = list(head.folder.glob("session_*/runtime_resources/working_dir_files/*"))
    assert found
    for unpacked in found:
        shutil.rmtree(unpacked, ignore_errors=True)


def kill_drivers(head: Head) -> int:
    killed = 0
    for process in drivers(head):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


@pytest.mark.slow
def test_a_job_killed_five_times_does_every_document_once(head: Head, folder: Path, tmp_path: Path) -> None:
    output, client, draw = tmp_path / "out" / "out.jsonl", JobSubmissionClient(head.dashboard), random.Random(SEED)
    recorded: set[str] = set()
    moments: list[tuple[int, float]] = []
    with BatchServer(pause_s=0.15) as server:
        words = ["--url", server.url, "--output", str(output), "--output-is-shared", "--max-tokens", "8"]
        words += ["--max-in-flight", "3"]
        for _ in range(KILLS):
            job = submit(head, folder, *words)
            more, pause = len(whole_lines(output)) + draw.randint(0, 6), draw.uniform(0, 0.4)
            asked = len(server.asked)

            def far_enough() -> bool:
                assert not (state := ended(client, job)), (state, client.get_job_logs(job))  # noqa: B023
                return len(whole_lines(output)) >= more and len(server.asked) > asked  # noqa: B023

            eventually(far_enough, 60)
            threading.Event().wait(pause)
            moments.append((more, pause))
            assert kill_drivers(head), moments
            assert eventually(lambda: ended(client, job), 30) == "FAILED"  # noqa: B023
            repeated = {about(body) for body in server.asked[asked:]} & recorded
            assert not repeated, (moments, repeated)
            recorded = {
                " ".join(str(json.loads(one)["summary"]).rstrip(".").split()[1:]) for one in whole_lines(output)
            }
        assert len(recorded) < DOCUMENTS, "there is something left to do"
        rows = (folder / "docs.jsonl").read_text().splitlines()
        changed = next(n for n in range(DOCUMENTS) if f"document number {n} is" in recorded)
        rows[changed] = json.dumps({"id": f"d{changed}", "text": "quite another text"})
        (folder / "docs.jsonl").write_text("\n".join(rows))
        delete_unpacked(head)
        asked = len(server.asked)
        job = submit(head, folder, *words)
        assert eventually(lambda: ended(client, job), 60) == "SUCCEEDED", client.get_job_logs(job)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [one["id"] for one in found] == [f"d{n}" for n in range(DOCUMENTS)], moments
    expected = [f"about document number {n} is." for n in range(DOCUMENTS)]
    expected[changed] = "about quite another text."
    assert [one["summary"] for one in found] == expected
    last = Counter(map(about, server.asked[asked:]))
    assert set(last.values()) == {1} and not set(last) & recorded and "quite another text" in last
    log = client.get_job_logs(job)
    assert f"{DOCUMENTS}/{DOCUMENTS} documents" in log and "done before" in log and "\x1b" not in log, log


@pytest.mark.slow
def test_results_come_back_to_whoever_submitted(head: Head, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: of the second job only what has changed comes back; and a job that could lose its output says so."""
    source, output = folder / "docs.jsonl", folder / "out.jsonl"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with BatchServer() as server:
        words = [
            "--input",
            str(source),
            "--url",
            server.url,
            "--max-tokens",
            "8",
            "--submit",
            "--address",
            head.dashboard,
        ]

        def run(*more: str) -> Any:
            return CliRunner().invoke(cli, ["summarize", *words, *more], env={"COLUMNS": "200"})

        done = run("--output", str(output), "--return")
        assert done.exit_code == 0, done.output
        first = output.read_bytes()
        assert [json.loads(line)["id"] for line in first.splitlines()] == [f"d{n}" for n in range(DOCUMENTS)]
        assert "documents" in done.stderr and "@tidegate" not in done.stderr
        rows = source.read_text().splitlines()
        rows[3] = json.dumps({"id": "d3", "text": "another one"})
        source.write_text("\n".join(rows))
        delete_unpacked(head)
        again = run("--output", str(output), "--return")
        assert again.exit_code == 0 and "1 done, 59 done before" in again.stderr, again.output
        lost = run("--output", "/out.jsonl")
        assert lost.exit_code == 1 and "--output /out.jsonl lies on the root file system" in lost.stderr, lost.output
    assert len(server.asked) == DOCUMENTS + 1
    lines = output.read_bytes().splitlines(keepends=True)
    assert b"about another one." in lines[3] and lines[:3] + lines[4:] == [
        one for n, one in enumerate(first.splitlines(keepends=True)) if n != 3
    ]
    assert all(mark_of(line) for line in lines)


@pytest.mark.slow
def test_without_a_service_a_job_says_so(head: Head, folder: Path) -> None:
    job = submit(head, folder, "--output", "/out.jsonl", "--output-is-shared")
    client = JobSubmissionClient(head.dashboard)
    assert eventually(lambda: ended(client, job), 60) == "FAILED"
    text = client.get_job_logs(job)
    assert "no service runs on this Ray" in text and "pass --url" in text, text
    assert "Traceback" not in text, text


def test_a_service_is_found_on_its_ray_and_does_a_batch(tiny: Stage, tmp_path: Path) -> None:
    """The real one: it counts, splits, answers in the batch class, and has the instruction in its cache."""
    url, capacity = discovery.found(None)
    assert url == tiny.url and capacity is not None and (capacity.units, capacity.name) == (2, "core")
    rows = [
        {"id": f"d{n}", "text": f"Document {n}. " + f"Something of it, and number {n} again. " * 12} for n in range(4)
    ]
    rows.append({"id": "long", "text": "\n\n".join(f"Paragraph {n}. " + "The tide comes in. " * 20 for n in range(12))})
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--input", str(source), "--output", str(output), "--url", url, "--max-tokens", "24", "--context", "640"]
    done = CliRunner().invoke(cli, ["summarize", *words, "--max-in-flight", "4"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    found = {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}
    assert list(found) == ["d0", "d1", "d2", "d3", "long"]
    assert len(found["long"]["tree"]["parts"]) >= 2 and found["long"]["usage"]["requests"] >= 3
    usage = [record["usage"] for record in found.values()]
    assert sum(one["cached_tokens"] for one in usage) >= 32 * (len(usage) - 2), "the instruction, but for the first"
    assert sum(one["completion_tokens"] for one in usage) > 0
