"""Returning: a job's output that goes to whoever submitted it, as frames in the job's log.

In the job nothing is kept. What the submitter has already, it has sent along as marks.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.jobs.frames import encoded
from deploy.jobs.ledger import LedgerError
from deploy.jobs.records import Mark

_END = "tidegate_end"


@dataclass(frozen=True, slots=True)
class End:
    """What a job says last: the settings' digest of its `records`, and whether every row has one."""

    settings: str
    records: int
    whole: bool


class FrameLedger:
    """Writes records as frames to the file descriptor `to`, standard output. Raises LedgerError for marks that cannot
    be read."""

    def __init__(self, settings: str, known: Path | None, to: int = 1) -> None:
        self.marks = read_marks(known) if known else []
        self._settings = settings
        self._to = to
        self._run = secrets.token_hex(4)
        self._number = 0
        self._whole = False

    def append(self, lines: Sequence[bytes]) -> None:
        """Records, each a line with its end."""
        for line in lines:
            self._write(line)

    def flush(self) -> None:
        """All of it is in the log already."""

    def finish(self, valid: Mapping[str, tuple[str, str]], order: Sequence[str] | None) -> None:
        """Order is the submitter's business."""
        self._whole = True

    def close(self) -> None:
        """Nothing more comes: the last word, so that whoever has read it has read all."""
        self._write(json.dumps({_END: [self._settings, self._number, self._whole]}).encode() + b"\n")

    def _write(self, record: bytes) -> None:
        for frame in encoded(self._run, self._number, record):
            sent = os.write(self._to, frame)
            while sent < len(frame):  # a file takes a short line at once; where it does not, what reads it will notice
                sent += os.write(self._to, frame[sent:])
        self._number += 1


def end_of(record: bytes) -> End | None:
    """What a job said last, if this is that."""
    try:
        settings, records, whole = json.loads(record)[_END]
    except (ValueError, KeyError, TypeError):
        return None
    return End(str(settings), int(records), bool(whole))


def write_marks(path: Path, marks: Sequence[Mark]) -> None:
    """Marks as a file for a job."""
    path.write_text("".join(json.dumps(mark.as_json()) + "\n" for mark in marks), encoding="utf-8")


def read_marks(path: Path) -> list[Mark]:
    """Marks from such a file. Raises LedgerError."""
    try:
        return list(_marks(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error


def _marks(text: str) -> Iterator[Mark]:
    for line in text.splitlines():
        key, digest, settings, failed = json.loads(line)
        yield Mark(str(key), str(digest), str(settings), bool(failed))
