"""Ledger: the output, as an append-only file of records that survives being killed at any moment.

A record counts once its line is whole and on disk. What a kill left of a last line is cut off when the file is opened
again; a file with lines that are no records is refused, since it must be somebody else's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy.jobs.records import HEAD, Mark, mark_of

SUPERSEDED = ".superseded"
"""Behind the output's name: where records go that a changed row or other settings have put out of date."""
_UNSUPPORTED = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


class LedgerError(Exception):
    """The output cannot be used."""


@dataclass(frozen=True, slots=True)
class Place:
    """A record's mark, and the bytes of its line."""

    mark: Mark
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The records of a file's content; `whole` bytes of it are kept, and a line's end is `lacking` behind them."""

    places: tuple[Place, ...]
    whole: int
    lacking: bool


def scanned(lines: Iterable[bytes], name: str) -> Scan:
    """What these lines are, each with its end. A last one without its end counts if it is a record all the same, else
    it is a kill's work. Raises LedgerError for any other line that is no record."""
    places: list[Place] = []
    start, lacking = 0, False
    for number, line in enumerate(lines, 1):
        mark = mark_of(line)
        lacking = not line.endswith(b"\n")
        if mark is None:
            if lacking and _is_torn(line):
                return Scan(tuple(places), start, False)
            raise LedgerError(f"{name}: line {number} is no record of `tidegate summarize`; choose another output")
        places.append(Place(mark, start, start + len(line)))
        start += len(line)
    return Scan(tuple(places), start, lacking)


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a record."""
    try:
        json.loads(line)
    except ValueError:
        return HEAD.startswith(line[: len(HEAD)])
    return False


def latest(places: Sequence[Place]) -> dict[str, Place]:
    """The record that counts of each key: the last one."""
    return {place.mark.key: place for place in places}


def arranged(
    places: Sequence[Place], valid: Mapping[str, tuple[str, str]], order: Sequence[str] | None
) -> tuple[list[Place], list[Place]]:
    """The records that stay, in the order of the keys in `order` (None: as they are), and those that are out of date.

    `valid` has the (digest, settings) of each key of the input. Records of other ids stay, before all others where
    there is an order; what was said about rows by their line goes when there is no such row."""
    last = latest(places)
    kept: list[Place] = []
    gone: list[Place] = []
    for place in places:
        mark = place.mark
        fits = valid.get(mark.key, (mark.digest, mark.settings) if mark.key.startswith("id:") else None)
        stays = last[mark.key] is place and fits == (mark.digest, mark.settings)
        (kept if stays else gone).append(place)
    if order is not None:
        ranks = {key: rank for rank, key in enumerate(order)}
        kept.sort(key=lambda place: ranks.get(place.mark.key, -1))
    return kept, gone


class FileLedger:
    """The output at `path`, which nobody else writes to meanwhile. Raises LedgerError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _locked(path)
        except OSError as error:
            raise LedgerError(f"--output {path}: {error.strerror or error}") from error
        try:
            scan = scanned(self._file, str(path))
            self._repair(scan)
        except BaseException:
            self._file.close()
            raise
        self._places = list(scan.places)

    @property
    def marks(self) -> list[Mark]:
        """Of the records that count."""
        return [place.mark for place in latest(self._places).values()]

    def append(self, lines: Sequence[bytes]) -> None:
        """Records, each a line with its end; they are on disk when this returns."""
        start = self._file.seek(0, os.SEEK_END)
        _write(self._file, b"".join(lines))
        for line in lines:
            mark = mark_of(line)
            assert mark is not None, "a line that is no record"
            self._places.append(Place(mark, start, start + len(line)))
            start += len(line)

    def flush(self) -> None:
        """All of it is on disk already."""

    def finish(self, valid: Mapping[str, tuple[str, str]], order: Sequence[str] | None) -> None:
        """The records in order, and those that are out of date out of the way; at once or not at all: the file is
        written anew under another name, then takes this one's place."""
        kept, gone = arranged(self._places, valid, order)
        if not gone and kept == self._places:
            return
        if gone:
            with self._path.with_name(self._path.name + SUPERSEDED).open("ab") as aside:
                _write(aside, b"".join(map(self._line, gone)))
        fresh = self._path.with_name(f".{self._path.name}.ordered")
        with fresh.open("wb") as file:
            for place in kept:
                file.write(self._line(place))
            _write(file, b"")
            with suppress(OSError):
                os.fchmod(file.fileno(), os.fstat(self._file.fileno()).st_mode & 0o7777)
        os.replace(fresh, self._path)
        _sync_folder(self._path.parent)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _line(self, place: Place) -> bytes:
        self._file.seek(place.start)
        line = self._file.read(place.end - place.start)
        return line if line.endswith(b"\n") else line + b"\n"

    def _repair(self, scan: Scan) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if scan.whole < size:
            self._file.truncate(scan.whole)
        if scan.lacking:
            self._file.write(b"\n")
        _write(self._file, b"")
        _sync_folder(self._path.parent)


def _locked(path: Path) -> BinaryIO:
    """The file, opened for appending, locked, and still the one of that name."""
    while True:
        file = path.open("ab+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # a file system without locks: whoever resubmits must see to it
                file.close()
                raise LedgerError(f"--output {path}: another run writes there; wait for it, or end it") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                return file
        file.close()  # a run that just ended has put another file in its place


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some network file systems have no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
