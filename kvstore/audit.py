"""Audit: references counted anew from the tables, a little at a time while everything goes on.

One pass visits every table, then compares every block. A table that was visited, or opened since the pass began, tells
of each change, so that the count is right when the comparison starts and stays right until its end. Repairs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvstore.pool import BlockPool, State
from kvstore.table import BlockTable

Wrong = tuple[int, int]
"""A block and the references that its tables have to it."""


class Audit:
    """Counts beside the references of `pool`. A pass counts and compares `work` blocks, about."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.work = 0
        self._pass = 0
        self._seen: list[int] = []
        self._unvisited: deque[BlockTable] = deque()
        self._cursor = 0
        self._begin(())

    def opened(self, table: BlockTable) -> None:
        """`table` was opened with the blocks that it has."""
        table.audited = self._pass
        self._count(table, 1)

    def closing(self, table: BlockTable) -> None:
        """`table` is about to let go of the blocks that it has."""
        if table.audited == self._pass:
            self._count(table, -1)
        table.audited = -1

    def note(self, table: BlockTable, block: int, change: int) -> None:
        """`table` got `block` (1) or gave it up (-1)."""
        if table.audited == self._pass:
            self._seen[block] += change

    def advance(self, tables: Iterable[BlockTable], limit: int) -> list[Wrong]:
        """Count or compare about `limit` blocks more. `tables` are those open now, for the pass that may begin."""
        while self._unvisited and limit > 0:
            table = self._unvisited.popleft()
            if table.audited >= 0:  # else it was closed
                table.audited = self._pass
                self._count(table, 1)
                limit -= table.held
        if limit <= 0:
            return []
        stop = min(self._pool.total, self._cursor + limit)
        wrong = [(block, self._seen[block]) for block in range(self._cursor, stop) if self._differs(block)]
        self._cursor = stop
        if stop == self._pool.total:
            self._begin(tables)
        return wrong

    def complete(self, tables: Iterable[BlockTable]) -> list[Wrong]:
        """A whole new pass at once."""
        self._begin(tables)
        return self.advance(tables, self.work + 1)

    def _begin(self, tables: Iterable[BlockTable]) -> None:
        self._pass += 1
        self._seen = [0] * self._pool.total
        self._unvisited = deque(tables)
        self._cursor = 0
        self.work = self._pool.total + sum(table.held for table in self._unvisited)

    def _count(self, table: BlockTable, change: int) -> None:
        for group in range(len(table.blocks)):
            for block in table.live(group):
                self._seen[block] += change

    def _differs(self, block: int) -> bool:
        refs = self._seen[block]
        return self._pool.refs[block] != refs or (self._pool.states[block] is State.HELD) != (refs > 0)
