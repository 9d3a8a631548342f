"""Batch: all rows of an input, each to exactly one record of the output, whatever was done before and whatever fails.

Knows what a row is, an output and whoever makes a record of a row; no server and no file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from deploy.jobs.records import Mark, Usage
from deploy.jobs.rows import Row

FLUSH_S = 5.0
"""How long a record may wait in an output that stores many at once."""


class Ledger(Protocol):
    """An output."""

    @property
    def marks(self) -> list[Mark]:
        """Of the records that it has, one for each key."""
        ...

    def append(self, lines: Sequence[bytes]) -> None:
        """Take records."""
        ...

    def flush(self) -> None:
        """Keep what was taken and is not kept yet."""
        ...

    def finish(self, valid: Mapping[str, tuple[str, str]], order: Sequence[str] | None) -> None:
        """The batch is whole: put records into the order of their keys (None: as they came), those that do not have
        the (digest, settings) of their key out of the way."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's record as a line, whether it is an error, and what it took."""

    line: bytes
    failed: bool
    usage: Usage


@dataclass(slots=True)
class Totals:
    """How far a batch is. `before`: rows that were done already; `documents`: rows done now, `failed` of them errors;
    `seconds`: since it began."""

    rows: int = 0
    before: int = 0
    documents: int = 0
    failed: int = 0
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)

    @property
    def missing(self) -> int:
        """Rows that have no record."""
        return self.rows - self.before - self.documents


Work = Callable[[Row], Awaitable[Outcome]]


class Batch:
    """`rows` gives all rows, as often as it is called; at most `workers` are in hand at once. `in_order`: the output is
    in the input's order at last. `again`: rows whose record is an error are done once more. `on_progress` is told of
    every record."""

    def __init__(
        self,
        rows: Callable[[], Iterator[Row]],
        ledger: Ledger,
        settings: str,
        *,
        workers: int,
        in_order: bool = True,
        again: bool = False,
        on_progress: Callable[[Totals], None] = lambda totals: None,
    ) -> None:
        self._rows = rows
        self._ledger = ledger
        self._settings = settings
        self._workers = workers
        self._in_order = in_order
        self._again = again
        self._on_progress = on_progress
        self._valid: dict[str, tuple[str, str]] = {}
        self._done: set[str] = set()
        self.totals = Totals()

    async def run(self, work: Work) -> Totals:
        """Do what is left to do. When the batch is whole the output is put in order. Raises what `work` does, after all
        that is done has been kept."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.to_thread(self._survey)
        self._on_progress(self.totals)
        todo: asyncio.Queue[Row | None] = asyncio.Queue(self._workers)
        made: asyncio.Queue[Outcome | None] = asyncio.Queue(4 * self._workers)
        writer = asyncio.ensure_future(self._write(made, lambda: clock() - began))
        crew = [asyncio.ensure_future(self._feed(todo))]
        crew += [asyncio.ensure_future(self._serve(todo, made, work)) for _ in range(self._workers)]
        try:
            await _first_failure([*crew, writer], until=crew)
        finally:
            await _end(crew)
            if not writer.done():
                await made.put(None)
            await writer
            await asyncio.to_thread(self._ledger.flush)
            self.totals.seconds = clock() - began
        if not self.totals.missing:
            await asyncio.to_thread(self._ledger.finish, self._valid, list(self._valid) if self._in_order else None)
        return self.totals

    def _survey(self) -> None:
        """Which rows there are, and which of them are done."""
        known = {mark.key: mark for mark in self._ledger.marks}
        for row in self._rows():
            self._valid[row.key] = (row.digest, self._settings)
            if (mark := known.get(row.key)) and mark.counts_for(row, self._settings, again=self._again):
                self._done.add(row.key)
        self.totals.rows, self.totals.before = len(self._valid), len(self._done)

    async def _feed(self, todo: asyncio.Queue[Row | None]) -> None:
        rows = self._rows()
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            digest, _ = self._valid.get(row.key, ("", ""))
            if digest == row.digest and row.key in self._done:
                continue
            self._renew(row, digest)
            await todo.put(row)
        for _ in range(self._workers):
            await todo.put(None)

    def _renew(self, row: Row, digest: str) -> None:
        """Somebody has written to the input since it was surveyed: what it holds now is what counts."""
        if row.key not in self._valid:
            self.totals.rows += 1
        elif digest != row.digest and row.key in self._done:
            self._done.discard(row.key)
            self.totals.before -= 1
        self._valid[row.key] = (row.digest, self._settings)

    async def _serve(self, todo: asyncio.Queue[Row | None], made: asyncio.Queue[Outcome | None], work: Work) -> None:
        while (row := await todo.get()) is not None:
            await made.put(await work(row))

    async def _write(self, made: asyncio.Queue[Outcome | None], seconds: Callable[[], float]) -> None:
        """Whatever has been made meanwhile is kept at once: one wait for the disk for all of it."""
        ended = False
        while not ended:
            try:
                first = await asyncio.wait_for(made.get(), FLUSH_S)
            except TimeoutError:
                await asyncio.to_thread(self._ledger.flush)
                continue
            waiting = [first, *(made.get_nowait() for _ in range(made.qsize()))]
            ended = None in waiting
            outcomes = [one for one in waiting if one is not None]
            if outcomes:
                await asyncio.to_thread(self._ledger.append, [one.line for one in outcomes])
                self._count(outcomes, seconds())

    def _count(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        for one in outcomes:
            self.totals.documents += 1
            self.totals.failed += one.failed
            self.totals.usage.include(one.usage)
        self.totals.seconds = seconds
        self._on_progress(self.totals)


async def _first_failure(watched: Sequence[asyncio.Future[None]], until: Sequence[asyncio.Future[None]]) -> None:
    """Return when all of `until` are done; raise what any of `watched` raises, as soon as it does."""
    pending = set(watched)
    while not all(one.done() for one in until):
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    for one in until:
        one.result()


async def _end(crew: Sequence[asyncio.Future[None]]) -> None:
    for one in crew:
        one.cancel()
    await asyncio.wait(crew)
    for one in crew:
        with suppress(Exception, asyncio.CancelledError):
            one.result()  # the first failure is on its way already
