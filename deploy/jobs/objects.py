"""Objects: the output at a URL that fsspec understands (s3://, gs://, …), where nothing can be appended to.

Records go to small objects of their own beside it, each whole or not there; when all is done they become one object in
order. What was not yet written when a run was killed is done again.
"""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deploy.jobs.ledger import SUPERSEDED, LedgerError, Place, arranged, latest, scanned
from deploy.jobs.records import Mark

PARTS = ".parts"
"""Behind the output's name: the folder of the records so far."""
BATCH = 64
"""Records that are written without waiting for more."""
LINGER_S = 5.0
"""How long a record waits for others."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object's content and the records in it."""

    data: bytes
    places: tuple[Place, ...]


class ObjectLedger:
    """The output at `url`. Raises LedgerError. Two runs at once must not share it: there is no lock."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._run = f"{int(time.time() * 1000):015d}-{secrets.token_hex(3)}"
        self._written = 0
        self._waiting: list[bytes] = []
        self._since = 0.0
        try:
            self._system, self._path = _opened(url)
            self._folder = self._path + PARTS
            self._stored = [self._read(path) for path in self._objects()]
        except LedgerError:
            raise
        except Exception as error:  # each kind of storage has its own
            raise LedgerError(f"--output {url}: {error}") from error

    @property
    def marks(self) -> list[Mark]:
        """Of the records that count."""
        return [place.mark for place in latest([one for stored in self._stored for one in stored.places]).values()]

    def append(self, lines: Sequence[bytes]) -> None:
        """Records; they are stored with the next `flush`, or now if there are many."""
        self._since = self._since if self._waiting else time.monotonic()
        self._waiting += lines
        if len(self._waiting) >= BATCH or time.monotonic() - self._since > LINGER_S:
            self.flush()

    def flush(self) -> None:
        """Store what waits as an object."""
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        path = f"{self._folder}/{self._run}-{self._written:06d}.jsonl"
        try:
            self._system.makedirs(self._folder, exist_ok=True)
            self._system.pipe_file(path, data)
        except Exception as error:
            raise LedgerError(f"{self._url}: a record could not be stored: {error}") from error
        self._stored.append(_Stored(data, scanned(io.BytesIO(data), path).places))
        self._waiting, self._written = [], self._written + 1

    def finish(self, valid: Mapping[str, tuple[str, str]], order: Sequence[str] | None) -> None:
        """One object of all records that count, in order; those that are out of date in another."""
        self.flush()
        whole, places = self._joined()
        kept, gone = arranged(places, valid, order)
        try:
            if gone:
                old = self._path + SUPERSEDED
                before = self._system.cat_file(old) if self._system.exists(old) else b""
                self._system.pipe_file(old, before + b"".join(whole[one.start : one.end] for one in gone))
            self._system.pipe_file(self._path, b"".join(whole[one.start : one.end] for one in kept))
            if self._system.exists(self._folder):
                self._system.rm(self._folder, recursive=True)
        except Exception as error:
            raise LedgerError(f"{self._url}: the records could not be put together: {error}") from error

    def close(self) -> None:
        """What waits is stored, as far as that goes."""
        self.flush()

    def _joined(self) -> tuple[bytes, list[Place]]:
        whole, places = bytearray(), []
        for stored in self._stored:
            base = len(whole)
            places += [Place(one.mark, one.start + base, one.end + base) for one in stored.places]
            whole += stored.data
        return bytes(whole), places

    def _objects(self) -> list[str]:
        """The finished output first, then the records behind it, oldest first."""
        found = [self._path] if self._system.exists(self._path) else []
        with suppress(FileNotFoundError):
            found += sorted(str(path) for path in self._system.ls(self._folder, detail=False))
        return found

    def _read(self, path: str) -> _Stored:
        data = self._system.cat_file(path)
        scan = scanned(io.BytesIO(data), path)
        return _Stored(data[: scan.whole] + (b"\n" if scan.lacking else b""), scan.places)


def _opened(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise LedgerError(f"--output {url}: {error}") from error
    return system, str(path)
