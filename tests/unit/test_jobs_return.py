"""Results that come back through a job's log; what travels with a job; where its service is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from deploy.jobs import discovery, submission, submitting
from deploy.jobs.batch import Totals
from deploy.jobs.discovery import Capacity, NoService, capacity
from deploy.jobs.documents import Input
from deploy.jobs.frames import Decoder, encoded
from deploy.jobs.ledger import FileLedger
from deploy.jobs.pace import Pace
from deploy.jobs.package import pack
from deploy.jobs.progress import Display, totals_lines
from deploy.jobs.records import Usage, summary_line
from deploy.jobs.returning import FrameLedger, read_marks, write_marks
from deploy.jobs.rows import Document
from deploy.jobs.run import Plan
from deploy.jobs.submission import Note, Parcel, SubmissionError
from deploy.jobs.template import Template
from deploy.jobs.tree import Node
from tests.unit.test_jobs_ledger import line


def decoded(decoder: Decoder, log: str) -> tuple[list[bytes], list[str]]:
    items = [*decoder.feed(log), *decoder.end()]
    return [one for one, _ in items if one is not None], [text for one, text in items if one is None]


@given(st.lists(st.binary(max_size=9000), max_size=5), st.integers(0, 2**32), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_records_come_through_a_log_that_others_write_to(records: list[bytes], seed: int, piece: int) -> None:
    draw, log = random.Random(seed), ""
    for number, record in enumerate(records):
        for frame in encoded("0123abcd", number, record):
            assert len(frame) < 4096
            log += draw.choice(["", "someone else's line\n", "no end of a line "]) + frame.decode("ascii")
    decoder, found = Decoder(), list[bytes]()
    for start in range(0, len(log), piece):
        found += [one for one, _ in decoder.feed(log[start : start + piece]) if one is not None]
    assert found == records and decoder.torn == 0
    decoder.restart()
    assert decoded(decoder, log)[0] == [], "each once, however often it is read"


def test_a_torn_frame_is_noticed_and_made_good_by_another_reading() -> None:
    frames = b"".join(encoded("0123abcd", 0, os.urandom(7000))).decode().splitlines(keepends=True)
    broken = frames[0] + frames[1][:50] + "\n" + frames[2]
    decoder = Decoder()
    assert decoded(decoder, broken)[0] == [] and decoder.torn == 1
    assert len(decoded(decoder, "".join(frames))[0]) == 1 and decoder.torn == 0


@pytest.mark.parametrize("spoil", [("@tidegate", "@elsewhere"), (" 1/1 ", " 2/1 "), ("A", "B")])
def test_what_is_no_sound_frame_is_no_record(spoil: tuple[str, str]) -> None:
    (frame,) = encoded("0123abcd", 0, bytes(30))
    assert decoded(Decoder(), frame.decode())[0] and not decoded(Decoder(), frame.decode().replace(*spoil))[0]


def written(tmp_path: Path, *lines: bytes, whole: bool = True, settings: str = "s") -> str:
    """The log of a job that returns these records."""
    with (tmp_path / "log").open("wb", buffering=0) as file:
        ledger = FrameLedger(settings, None, file.fileno())
        ledger.append(lines)
        if whole:
            ledger.finish({}, None)
        ledger.close()
    return (tmp_path / "log").read_text()


def test_marks_travel_to_the_job(tmp_path: Path) -> None:
    ledger = FileLedger(tmp_path / "out.jsonl")
    ledger.append([line("a"), line("b")])
    write_marks(tmp_path / "known", ledger.marks)
    assert FrameLedger("s", tmp_path / "known").marks == ledger.marks == read_marks(tmp_path / "known")


@dataclass
class Info:
    status: Any
    message: str = ""


class Status(str):
    def is_terminal(self) -> bool:
        return self in ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass
class Cluster:
    """Ray's client for jobs, without Ray: the log of each job that will be submitted, in turn; with `breaks` the
    connection that follows it breaks so often first."""

    logs: list[str]
    status: str = "SUCCEEDED"
    breaks: int = 0
    breaking: Exception = field(default_factory=OSError)
    jobs: dict[str, str] = field(default_factory=dict)
    states: dict[str, Status] = field(default_factory=dict)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)

    def submit_job(self, **job: Any) -> str:
        self.submitted.append(job)
        with zipfile.ZipFile(job["runtime_env"]["working_dir"]) as archive:
            names = archive.namelist()
            self.known.append(len(archive.read("brought/known").splitlines()) if "brought/known" in names else -1)
            self.rows.append(archive.read("brought/input").decode() if "brought/input" in names else "")
        id = str(job["submission_id"])
        self.jobs[id], self.states[id] = self.logs.pop(0), Status(self.status)
        return id

    def get_job_info(self, id: str) -> Info:
        if id not in self.jobs:
            raise RuntimeError("no such job")
        state = self.states[id]
        self.states[id] = Status(self.status)
        return Info(state)

    def get_job_logs(self, id: str) -> str:
        return self.jobs[id]

    async def tail_job_logs(self, id: str) -> AsyncIterator[str]:
        log = self.jobs[id]
        yield log[: len(log) // 2]
        if self.breaks:
            self.breaks -= 1
            self.states[id] = Status("RUNNING")
            raise self.breaking
        yield log[len(log) // 2 :]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": id, "text": f"text of {id}"}) + "\n" for id in "abc"))
    return path


def record(source: Path, id: str, settings: str = "s") -> bytes:
    (row,) = (row for row in Input(source).rows() if row.key == f"id:{id}")
    assert isinstance(row, Document)
    return summary_line(row, settings, "m", Usage(), Node(0, 1, 1, f"sum of {id}"))


def run(cluster: Cluster, source: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[bool, str]:
    """Whether the batch is whole, and what was said."""
    monkeypatch.setattr(submitting, "connected", lambda address: cluster)
    monkeypatch.setattr(submission, "_POLL_S", 0.01)
    plan = Plan(Input(source), Template.read(None))
    with (source.parent / "said").open("w+") as said:
        console = Console(file=said, width=200)
        parcel = Parcel(options, plan.input, None, False)
        whole = asyncio.run(submitting.with_return(parcel, plan, source.parent / "out.jsonl", None, console))
        said.seek(0)
        return whole, said.read()


def ids(source: Path) -> list[str]:
    return [json.loads(one)["id"] for one in (source.parent / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("breaks", "breaking"), [(0, OSError()), (2, RuntimeError("closed unexpectedly")), (1, aiohttp.ClientError("no"))]
)
def test_results_come_back_in_order(
    source: Path, monkeypatch: pytest.MonkeyPatch, breaks: int, breaking: Exception
) -> None:
    log = "first words\n" + written(source.parent, *(record(source, id) for id in "cab"))
    cluster = Cluster([log], breaks=breaks, breaking=breaking)
    whole, said = run(cluster, source, monkeypatch, "--max-tokens", "9")
    assert whole and ids(source) == ["a", "b", "c"]
    assert said.count("first words") == 1 and "@tidegate" not in said
    job = cluster.submitted[0]
    assert job["entrypoint"].startswith("python -m deploy summarize --max-tokens 9 --input brought/input --return")
    assert Note.read(source.parent / "out.jsonl") is None


def test_a_job_that_was_killed_is_gone_on_with(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [
        written(source.parent, record(source, "c"), whole=False)[:-30],
        written(source.parent, record(source, "a"), record(source, "b")),
    ]
    first = Cluster(logs[:1], status="FAILED")
    assert run(first, source, monkeypatch)[0] is False and ids(source) == ["c"]
    second = Cluster(logs[1:])
    assert run(second, source, monkeypatch)[0] is True
    assert second.known == [1] and ids(source) == ["a", "b", "c"]


def test_a_submitter_that_was_killed_finds_its_job_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = written(source.parent, *(record(source, id) for id in "abc"))
    cluster = Cluster([], jobs={"job-1": log}, states={"job-1": Status("RUNNING")})
    output = source.parent / "out.jsonl"
    output.write_bytes(record(source, "a"))
    Note("job-1", Parcel((), Input(source), None, False).digest).write(output)
    whole, said = run(cluster, source, monkeypatch)
    assert whole and ids(source) == ["a", "b", "c"] and "job-1 runs already" in said and not cluster.submitted


def test_what_an_ended_job_left_in_its_log_is_taken_first(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = written(source.parent, record(source, "a"), record(source, "b"), whole=False)
    cluster = Cluster(
        [written(source.parent, record(source, "c"))], jobs={"job-1": left}, states={"job-1": Status("FAILED")}
    )
    Note("job-1", "whatever").write(source.parent / "out.jsonl")
    whole, _ = run(cluster, source, monkeypatch)
    assert whole and cluster.known == [2] and ids(source) == ["a", "b", "c"]


def test_a_job_with_other_options_is_not_taken_for_this_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster([], status="RUNNING", jobs={"job-1": ""}, states={"job-1": Status("RUNNING")})
    Note("job-1", "other").write(source.parent / "out.jsonl")
    with pytest.raises(SubmissionError, match=r"job-1 works for .* with other options"):
        run(cluster, source, monkeypatch)


def test_a_batch_that_is_not_whole_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = written(source.parent, record(source, "a"), record(source, "b"))
    assert run(Cluster([lacking]), source, monkeypatch)[0] is False, "the input has a row without a record"
    torn = written(source.parent, record(source, "c")).replace(" 1/1 ", " 1/2 ", 1)
    whole, said = run(Cluster([torn]), source, monkeypatch)
    assert not whole and "not all that job" in said


def test_what_travels_with_a_job_is_small(tmp_path: Path, source: Path) -> None:
    brought = tmp_path / "brought"
    brought.mkdir()
    (brought / "input").write_bytes(source.read_bytes())
    size = pack(tmp_path / "job.zip", brought)
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        names = set(archive.namelist())
        assert archive.read("brought/input") == source.read_bytes()
    assert {"deploy/__main__.py", "deploy/jobs/command.py", "cluster/errors.py"} <= names
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)
    assert size < 2**20 and (tmp_path / "job.zip").stat().st_size < 2**20


def test_files_that_rows_name_travel_as_texts(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "a.txt").write_text("text of a")
    rows = source.read_text().splitlines()
    source.write_text("\n".join([json.dumps({"id": "a", "path": "a.txt"}), *rows[1:]]))
    cluster = Cluster([written(source.parent, *(record(source, id) for id in "abc"))])
    assert run(cluster, source, monkeypatch)[0] is True
    assert json.loads(cluster.rows[0].splitlines()[0]) == {"id": "a", "text": "text of a"}


@pytest.mark.parametrize(
    ("host", "proxies", "url"),
    [
        ("0.0.0.0", ["10.0.0.1", "10.0.0.2"], "http://10.0.0.2:8000"),
        ("0.0.0.0", ["10.0.0.1"], "http://10.0.0.1:8000"),
        ("127.0.0.1", ["10.0.0.2"], "http://127.0.0.1:8000"),
        ("10.0.0.1", ["10.0.0.1"], "http://10.0.0.1:8000"),
        ("::", ["fd00::1"], "http://[fd00::1]:8000"),
    ],
)
def test_a_service_is_asked_where_it_can_be_reached(host: str, proxies: list[str], url: str) -> None:
    assert discovery.address(host, 8000, proxies, "10.0.0.2") == url


def test_a_service_that_cannot_be_reached_is_told() -> None:
    with pytest.raises(NoService, match=r"listens on 127.0.0.1 of another node \(10.0.0.1\)"):
        discovery.address("127.0.0.1", 8000, ["10.0.0.1"], "10.0.0.2")
    with pytest.raises(NoService, match="without an HTTP proxy"):
        discovery.address("0.0.0.0", 8000, [], "10.0.0.2")


def test_capacity_is_gpus_or_threads() -> None:
    def status(*ranks: dict[str, Any]) -> dict[str, Any]:
        return {"groups": [{"ranks": [rank]} for rank in ranks]}

    assert capacity(status({"device": "cpu", "threads": 2}, {"device": "cpu", "threads": 1})) == Capacity(3, "core")
    assert capacity(status({"device": "cuda:0", "threads": 1}, {"device": "cuda:1", "threads": 1})) == Capacity(
        2, "GPU"
    )
    assert capacity({"groups": []}) is None
    totals = Totals(rows=4, before=1, documents=2, failed=1, seconds=10.0, usage=Usage(2, 100, 50, 25))
    lines = "\n".join(totals_lines(totals, Capacity(3, "core")))
    for part in (
        "2 done, 1 done before, 1 of them errors, 1 left",
        "25% of them cached",
        "15.0 tokens/s",
        "30.0 core-seconds",
    ):
        assert part in lines, lines


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_or_lines(tmp_path: Path, terminal: bool) -> None:
    clock = [0.0]
    with (tmp_path / "said").open("w+") as file:
        console = Console(file=file, force_terminal=terminal, width=120)
        with Display(console, Pace(1), lambda: clock[0]) as display:
            for done in range(5):
                display.show(Totals(rows=5, documents=done, seconds=1.0, usage=Usage(completion_tokens=7)))
                clock[0] += 4.0
            display.trouble("full")
            display.trouble("full")
        file.seek(0)
        said = file.read()
    assert said.count("waiting: full") == 1
    if terminal:
        assert "4/5" in said and "\x1b[" in said
    else:
        assert [text.partition(",")[0] for text in said.splitlines()] == [
            "0/5 documents",
            "3/5 documents",
            "waiting: full",
        ]
