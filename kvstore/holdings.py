"""Holdings: the open tables of a pool and the references that they have to its blocks, which the audit checks.

Every reference is taken and given up here. Knows neither tokens nor what a step computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.audit import Audit
from kvstore.pool import BlockPool, State
from kvstore.prefixes import PrefixCache
from kvstore.table import GONE, BlockTable


class Holdings:
    """`leaked` counts blocks whose references differed from the tables and were repaired."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self.leaked = 0
        self._pool = pool
        self._cache = cache
        self._audit = Audit(pool)
        self._tables: dict[int, BlockTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables.values())

    def open(self, table: BlockTable) -> BlockTable:
        """Take a reference to each of the blocks that `table` comes with."""
        for group in range(len(table.blocks)):
            for block in table.live(group):
                self._hold(block)
        self._tables[id(table)] = table
        self._audit.opened(table)
        return table

    def close(self, table: BlockTable, now: float) -> None:
        """Tail blocks leave first, so that an idle child is always older than its parent."""
        del self._tables[id(table)]
        self._audit.closing(table)
        for group, blocks in enumerate(table.blocks):
            for block in reversed(table.live(group)):
                self._drop(block, now, soil=table.forgotten)
            blocks.clear()
            table.gone[group] = 0

    def slide(self, table: BlockTable, group: int, first: int, now: float) -> None:
        """Let go of the blocks before index `first`."""
        blocks = table.blocks[group]
        for index in range(table.gone[group], min(first, len(blocks))):
            block, blocks[index] = blocks[index], GONE
            table.gone[group] += 1
            self._audit.note(table, block, -1)
            self._drop(block, now, soil=table.forgotten)

    def take(self, count: int) -> list[int] | None:
        """FREE blocks with one reference each, at the expense of the oldest IDLE ones; None when that needs steps in
        flight to be applied first, or more than there is."""
        if count > self._pool.ready + self._pool.idle:
            return None
        while self._pool.ready < count:
            block = self._pool.evictable()
            if block is None:
                return None
            self._cache.evict(block)
        return [block for block in (self._pool.take() for _ in range(count)) if block is not None]

    def append(self, table: BlockTable, group: int, block: int) -> None:
        """A block that `take` gave becomes the last of the table."""
        table.blocks[group].append(block)
        self._audit.note(table, block, 1)

    def replace(self, table: BlockTable, group: int, index: int, block: int, now: float) -> None:
        """A block that `take` gave stands at `index` instead of the one there."""
        old, table.blocks[group][index] = table.blocks[group][index], block
        self._audit.note(table, old, -1)
        self._audit.note(table, block, 1)
        self._drop(old, now)

    def replace_everywhere(self, group: int, index: int, twin: int, block: int, now: float) -> None:
        """Every table that holds `block` at `index` holds `twin` there instead."""
        for table in self._tables.values():
            blocks = table.blocks[group]
            if index < len(blocks) and blocks[index] == block:
                self._hold(twin)
                self.replace(table, group, index, twin, now)

    def owned(self, table: BlockTable) -> int:
        """Blocks that `table` holds alone."""
        refs = self._pool.refs
        return sum(refs[block] == 1 for group in range(len(table.blocks)) for block in table.live(group))

    def borrowed(self, tables: Iterable[BlockTable]) -> list[int]:
        """For each table, how many blocks at its head (of the first layer group, which must have no window) a table
        before it in the list holds too.

        Tables share heads only, so that two searches by halves find the border: O(log blocks) each, and once for
        every shared block.
        """
        if not self._pool.shared:
            return [0 for _ in tables]
        refs, counted = self._pool.refs, set[int]()
        borrowed = []
        for table in tables:
            blocks = table.blocks[0]
            shared = bisect_left(blocks, True, key=lambda block: refs[block] < 2)
            known = bisect_left(blocks, True, hi=shared, key=lambda block: block not in counted)
            counted.update(blocks[known:shared])
            borrowed.append(known)
        return borrowed

    def audit(self, now: float, share: float) -> int:
        """Compare references with the tables, `share` of the whole pool more (1: all of it, now), and repair what
        differs; returns how many blocks did."""
        audit, tables = self._audit, self._tables.values()
        wrong = audit.complete(tables) if share >= 1 else audit.advance(tables, int(audit.work * share) + 1)
        for block, refs in wrong:
            self._repair(block, refs, now)
        self.leaked += len(wrong)
        return len(wrong)

    def check(self) -> None:
        """References are those of the tables, and no table reads what belongs to another namespace."""
        tables = self._tables.values()
        counts = Counter(b for table in tables for group in range(len(table.blocks)) for b in table.live(group))
        for block in range(self._pool.total):
            assert self._pool.refs[block] == counts.get(block, 0), f"block {block} has wrong references"
        for table in self._tables.values():
            assert table.sealed <= min(map(len, table.blocks))
            for group, blocks in enumerate(table.blocks):
                gone = table.gone[group]
                assert set(blocks[:gone]) <= {GONE} and GONE not in blocks[gone:], "a table has holes"
                for index, block in enumerate(blocks[gone:], start=gone):
                    foreign = block in self._cache and self._cache.index.entry(block).namespace != table.owner(index)
                    assert not foreign, f"block {block} is read across namespaces"

    def _hold(self, block: int) -> None:
        if self._pool.states[block] is State.IDLE:
            self._cache.wake(block)
        self._pool.hold(block)

    def _drop(self, block: int, now: float, *, soil: bool = False) -> None:
        self._pool.drop(block, sealed=block in self._cache, now=now, soil=soil)
        if self._pool.states[block] is State.IDLE:
            self._cache.rest(block, now)

    def _repair(self, block: int, refs: int, now: float) -> None:
        """References as the tables have them. A block that no table holds is zeroed, unless others follow it."""
        state = self._pool.states[block]
        if state is State.IDLE and refs:
            self._cache.wake(block)
        elif state is State.HELD and not refs and not self._cache.index.children(block):
            self._cache.discard(block)
        self._pool.repair(block, refs)
        if not refs and state is State.HELD:
            self._drop(block, now, soil=True)
