"""Submission: the same command as a Ray job, followed from here; with its results, where they come back.

What a job has returned is in the output here as soon as its log shows it. Should this end before the job does, the same
command finds the job again by the note beside the output, takes what it has meanwhile said, and goes on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.jobs.documents import Input
from deploy.jobs.frames import Decoder
from deploy.jobs.ledger import FileLedger
from deploy.jobs.package import BROUGHT, pack
from deploy.jobs.records import Mark, mark_of
from deploy.jobs.returning import End, end_of, write_marks
from deploy.jobs.rows import digest_of

NOTE = ".job"
"""Behind the output's name: which job works for it."""
MAX_INPUT = 200 * 2**20
"""Bytes of input that travel with a job, compressed; more belongs where the nodes can read it."""
_POLL_S = 1.0
_SILENCE = 60
Say = Callable[[str], None]


class SubmissionError(Exception):
    """There is no such Ray, or it does not take the job."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a job is told: `options` of the command without those about input, output and submission; `input` is brought
    along unless the nodes see it (`shared`); `template` is brought along."""

    options: Sequence[str]
    input: Input
    template: Path | None
    shared: bool

    @property
    def digest(self) -> str:
        """What two jobs have in common that do the same."""
        template = self.template.read_text(encoding="utf-8") if self.template else ""
        return digest_of(*self.options, str(self.input.path.resolve()), template)


def connected(address: str | None) -> Any:
    """Ray's client for jobs. Raises SubmissionError."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SubmissionError(
            f"--submit: no Ray takes jobs at {address or 'the address that Ray finds by itself'}: {error}. Jobs need "
            "Ray's dashboard: give its address, as in --address http://127.0.0.1:8265; a service that `tidegate serve` "
            "started has none: leave --submit out there"
        ) from error


def submit(client: Any, parcel: Parcel, known: Sequence[Mark] | None) -> str:
    """Submit a job; its id. `known`: what its results are to be added to, which come back; None: they do not."""
    nonce = secrets.token_hex(4)
    with tempfile.TemporaryDirectory() as folder:
        brought = Path(folder) / BROUGHT
        brought.mkdir()
        (brought / "submission").write_text(nonce)  # no other package is like this one: none is taken for it
        words = ["python", "-m", "deploy", "summarize", *parcel.options]
        words += ["--input", _bring_input(parcel, brought)]
        if parcel.template:
            (brought / "template").write_bytes(parcel.template.read_bytes())
            words += ["--prompt-template", f"{BROUGHT}/template"]
        if known is not None:
            write_marks(brought / "known", known)
            words += ["--return", "--known", f"{BROUGHT}/known"]
        archive = Path(folder) / "job.zip"
        pack(archive, brought)
        if archive.stat().st_size > MAX_INPUT:
            raise SubmissionError(
                f"--submit: the input is {archive.stat().st_size / 2**20:.0f} MiB compressed, at most "
                f"{MAX_INPUT / 2**20:.0f} travel with a job: put it where all nodes see it, with --input-is-shared"
            )
        try:
            return str(
                client.submit_job(
                    entrypoint=shlex.join(words),
                    runtime_env={"working_dir": str(archive)},
                    submission_id=f"tidegate-summarize-{nonce}",
                    metadata={"tidegate": "summarize"},
                )
            )
        except RuntimeError as error:
            raise SubmissionError(f"--submit: Ray does not take the job: {error}") from error


def _bring_input(parcel: Parcel, brought: Path) -> str:
    if parcel.shared:
        return str(parcel.input.path.absolute())
    parcel.input.copy_to(brought / "input")
    return f"{BROUGHT}/input"


class Collector:
    """Takes a job's log: records into `ledger`, once each; every other line goes to `say`. Without a ledger nothing is
    expected to come back."""

    def __init__(self, ledger: FileLedger | None, say: Say) -> None:
        self._ledger = ledger
        self._say = say
        self._decoder = Decoder()
        self._known = set(ledger.marks) if ledger is not None else set()
        self._records = 0
        self._told = 0
        self._skipped = 0
        self.end: End | None = None

    def take(self, log: str) -> None:
        """A piece of the log."""
        self._sort([*self._decoder.feed(log)])

    def finish(self) -> None:
        """It has ended."""
        self._sort([*self._decoder.end()])

    def restart(self) -> None:
        """It comes from its beginning again: what was told is not told twice."""
        self._decoder.restart()
        self._skipped = self._told

    @property
    def may_lack(self) -> bool:
        """Whether something that the job has sent may not have come: all of it has with its last word."""
        return self._decoder.torn > 0 or self.end is None or self._records < self.end.records

    def _sort(self, items: Sequence[tuple[bytes | None, str]]) -> None:
        lines = []
        for record, text in items:
            if record is None:
                self._tell(text)
            elif end := end_of(record):
                self.end = end
            elif mark := mark_of(record):
                self._records += 1
                lines += [record] if mark not in self._known else []
                self._known.add(mark)
        if lines and self._ledger is not None:
            self._ledger.append(lines)

    def _tell(self, text: str) -> None:
        if self._skipped:
            self._skipped -= 1
            return
        self._told += 1
        self._say(text)


def silent(text: str) -> None:
    """For a log that has been shown before."""


async def follow(client: Any, job: str, collector: Collector) -> bool:
    """Take the job's log until the job has ended; whether it has succeeded. A connection that breaks is made again.
    Raises SubmissionError when nobody knows of the job any more."""
    silence = 0
    while True:
        with suppress(RuntimeError, OSError, TimeoutError, aiohttp.ClientError):
            async for piece in client.tail_job_logs(job):
                collector.take(piece)
        info = await asyncio.to_thread(_info, client, job)
        if info is not None and info.status.is_terminal():
            break
        silence = 0 if info is not None else silence + 1
        if silence > _SILENCE:
            raise SubmissionError(f"Ray says nothing of job {job} any more: run the same command again to go on")
        await asyncio.sleep(_POLL_S)
        collector.restart()
    collector.finish()
    succeeded = bool(info.status == "SUCCEEDED")
    if collector.may_lack or not succeeded:  # following a log, one may miss its last lines
        collector.restart()
        collector.take(await asyncio.to_thread(_log, client, job))
        collector.finish()
    return succeeded


def _info(client: Any, job: str) -> Any:
    try:
        return client.get_job_info(job)
    except (RuntimeError, OSError):
        return None


def _log(client: Any, job: str) -> str:
    """All of it; "" where Ray does not give it."""
    try:
        return str(client.get_job_logs(job))
    except (RuntimeError, OSError):
        return ""


@dataclass(frozen=True, slots=True)
class Note:
    """Which job works for an output: its id, and the digest of its parcel."""

    job: str
    digest: str

    @classmethod
    def read(cls, output: Path) -> Note | None:
        """The note beside an output, if there is one that can be read."""
        try:
            value = json.loads(output.with_name(output.name + NOTE).read_text())
            return cls(str(value["job"]), str(value["digest"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, output: Path) -> None:
        """Leave it there."""
        output.with_name(output.name + NOTE).write_text(json.dumps({"job": self.job, "digest": self.digest}) + "\n")

    @staticmethod
    def remove(output: Path) -> None:
        """The job has ended and all that it returned is here."""
        output.with_name(output.name + NOTE).unlink(missing_ok=True)


async def returned(client: Any, parcel: Parcel, output: Path, ledger: FileLedger, say: Say) -> tuple[bool, End | None]:
    """Submit, or find the job that works for `output` already, and take its results until it has ended. Returns whether
    it succeeded and everything it sent has come, and what it said last."""
    note = Note.read(output)
    info = await asyncio.to_thread(_info, client, note.job) if note else None
    if note and info is not None and not info.status.is_terminal():
        if note.digest != parcel.digest:
            raise SubmissionError(
                f"job {note.job} works for {output} with other options: wait for it, or end it: ray job stop {note.job}"
            )
        say(f"job {note.job} runs already: following it")
        job = note.job
    else:
        if note and info is not None:
            rest = Collector(ledger, silent)
            rest.take(await asyncio.to_thread(_log, client, note.job))
            rest.finish()
        job = await asyncio.to_thread(submit, client, parcel, ledger.marks)
        Note(job, parcel.digest).write(output)
        say(f"submitted job {job}")
    collector = Collector(ledger, say)
    succeeded = await follow(client, job, collector)
    if not collector.may_lack:
        Note.remove(output)
    elif succeeded:
        say(f"not all that job {job} returned has come")
        return False, None
    return succeeded, collector.end
