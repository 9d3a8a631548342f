"""Frames: records on their way through a job's log, where other processes write too.

A record is cut into frames, a line each, short enough to be written at once. Whoever reads finds them among whatever
else the log holds, puts them together, and knows at the end whether any is missing. Pure.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator

_PAYLOAD = 2_700
"""Bytes of a record in one frame: a line is below 4096 then, which a pipe takes as a whole."""
_FRAME = re.compile(r"@tidegate ([0-9a-f]{8}) (\d+) (\d+)/(\d+) ([0-9a-f]{8}) ([A-Za-z0-9+/=]*)@")
_KEPT = 8_192
"""Characters of a line without its end that may still become a frame."""


def encoded(run: str, number: int, record: bytes) -> list[bytes]:
    """Record `number` (from 0) of `run` (8 hex digits) as lines."""
    pieces = [record[start : start + _PAYLOAD] for start in range(0, len(record), _PAYLOAD)] or [b""]
    frames = []
    for index, piece in enumerate(pieces, 1):
        check = zlib.crc32(piece)
        head = f"@tidegate {run} {number} {index}/{len(pieces)} {check:08x} "
        frames.append(head.encode() + base64.b64encode(piece) + b"@\n")
    return frames


class Decoder:
    """Takes a log piece by piece, cut anywhere; gives whole records, each once, however often the log is read."""

    def __init__(self) -> None:
        self._rest = ""
        self._open: dict[tuple[str, int], dict[int, bytes]] = {}
        self._done: set[tuple[str, int]] = set()

    def feed(self, log: str) -> Iterator[tuple[bytes | None, str]]:
        """(record, "") for each that is whole now; (None, line) for each line that is no frame."""
        lines = (self._rest + log).split("\n")
        self._rest = lines.pop()[-_KEPT:]
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[tuple[bytes | None, str]]:
        """The log has ended: its last line has no end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from self._line(rest)

    def restart(self) -> None:
        """The log will be read from its beginning again."""
        self._rest = ""

    @property
    def torn(self) -> int:
        """Records of which some frames have come and others have not."""
        return len(self._open)

    def _line(self, line: str) -> Iterator[tuple[bytes | None, str]]:
        found = False
        for match in _FRAME.finditer(line):
            found = True
            record = self._take(match)
            if record is not None:
                yield record, ""
        if not found:
            yield None, line

    def _take(self, match: re.Match[str]) -> bytes | None:
        """The record that this frame completes."""
        run, number, index, count = match[1], int(match[2]), int(match[3]), int(match[4])
        try:
            piece = base64.b64decode(match[6], validate=True)
        except ValueError:
            return None
        if zlib.crc32(piece) != int(match[5], 16) or (run, number) in self._done or not 1 <= index <= count:
            return None
        pieces = self._open.setdefault((run, number), {})
        pieces[index] = piece
        if len(pieces) < count:
            return None
        del self._open[run, number]
        self._done.add((run, number))
        return b"".join(pieces[one] for one in range(1, count + 1))
