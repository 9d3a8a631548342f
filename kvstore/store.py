"""KVStore: all that a scheduler sees of KV memory. Tables of blocks, shared prefixes, copies on write, expiry.

Joins the pool (states), the index (contents) and the sessions (who). Knows neither requests nor ranks nor the clock.
Full is an answer here, never an exception; assertions state invariants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.chain import BlockKey, chain_key, chain_root
from kvstore.index import Entry, PrefixIndex
from kvstore.pool import BlockPool, State
from kvstore.sessions import Sessions

Copy = tuple[int, int]


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, per layer group; `keys` are those of its first full blocks, `sealed` how many of them
    have been offered to the index, `cached` the tokens it found there when it was opened."""

    namespace: bytes
    blocks: tuple[list[int], ...]
    keys: list[BlockKey] = field(default_factory=list)
    sealed: int = 0
    cached: int = 0

    def __len__(self) -> int:
        return len(self.blocks[0])


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is cached: full blocks from its start; how many of them are IDLE (adopting consumes them)."""

    blocks: int
    idle: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Blocks by state; held + idle + free + dirty = total."""

    total: int
    free: int
    held: int
    idle: int
    dirty: int
    block_size: int


class KVStore:
    """`total` blocks of `block_size` tokens for `groups` layer groups; `ttl` seconds of life for unused contents.

    Each group's tables draw from the same pool, so a sequence of n tokens takes `groups * ceil(n / block_size)` blocks.
    `scheme` names how the bytes come about (model revision, KV precision, rope); it roots every key.
    """

    def __init__(
        self,
        total: int,
        block_size: int,
        *,
        groups: int = 1,
        ttl: float = 300.0,
        prefix_cache: bool = True,
        scheme: bytes = b"",
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.pool = BlockPool(total)
        self.sessions = Sessions(ttl)
        self.leaked = 0
        self.evictions = 0
        self.expirations = 0
        self._prefix_cache = prefix_cache
        self._scheme = scheme
        self._index = PrefixIndex()
        self._tables: dict[int, BlockTable] = {}

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def available(self) -> int:
        """Blocks that `grow` can get now or as soon as the steps in flight are applied: FREE and IDLE."""
        return self.pool.free + self.pool.idle

    @property
    def tables(self) -> int:
        """Tables that are open."""
        return len(self._tables)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` take over all layer groups."""
        return self.groups * -(-tokens // self.block_size)

    def match(self, namespace: bytes, tokens: Sequence[int], keys: list[BlockKey], now: float) -> Match:
        """What `adopt` would find, without touching anything but `keys`: the chain of `tokens` as far as it was needed
        before, which grows in place, so that nobody hashes a prompt twice."""
        hits = self._lookup(namespace, tokens, keys, now)
        idle = sum(self.pool.states[block] is State.IDLE for group in hits for block in group)
        return Match(len(hits[0]), idle)

    def adopt(self, namespace: bytes, tokens: Sequence[int], keys: list[BlockKey], now: float) -> BlockTable:
        """Open a table whose head is the cached prefix of `tokens`. At least the last token is left to compute. The
        table keeps `keys` as its own."""
        hits = self._lookup(namespace, tokens, keys, now)
        for group in hits:
            for block in group:
                self.pool.hold(block)
        hit = len(hits[0])
        table = BlockTable(namespace, hits, keys, sealed=hit, cached=hit * self.block_size)
        self._tables[id(table)] = table
        self.sessions.touch(namespace, now)
        return table

    def grow(self, table: BlockTable, start: int, stop: int, now: float) -> tuple[Copy, ...] | None:
        """Make positions [start, stop) writable: enough blocks, none of those written to shared.

        Returns the (source, destination) copies that the next plan must make, or None, with the table unchanged, when
        the pool cannot give enough blocks now.
        """
        shared = self._shared_tail(table, start)
        missing = self._missing(table, stop)
        taken = self._take(missing * self.groups + len(shared))
        if taken is None:
            return None
        copies = []
        for group, index in shared:
            source, destination = table.blocks[group][index], taken.pop()
            copies.append((source, destination))
            self.pool.drop(source, sealed=source in self._index, now=now)
            table.blocks[group][index] = destination
        for _ in range(missing):
            for blocks in table.blocks:
                blocks.append(taken.pop())
        return tuple(copies)

    def shortage(self, table: BlockTable, start: int, stop: int) -> int:
        """Blocks that `grow` would still lack if every step in flight were applied."""
        need = self._missing(table, stop) * self.groups + len(self._shared_tail(table, start))
        return max(0, need - self.available)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whoever writes to a shared one first gets a copy (see `grow`)."""
        for blocks in table.blocks:
            for block in blocks:
                self.pool.hold(block)
        twin = BlockTable(
            table.namespace, tuple(list(b) for b in table.blocks), list(table.keys), table.sealed, table.cached
        )
        self._tables[id(twin)] = twin
        return twin

    def seal(self, table: BlockTable, tokens: Sequence[int], computed: int, now: float) -> None:
        """Index the full blocks among the first `computed` tokens, whose values are in place on every rank.

        A block whose content is indexed already gives way to its twin in every table that holds it.
        """
        full = computed // self.block_size
        if not self._prefix_cache or table.sealed >= full:
            return
        for index in range(table.sealed, full):
            content = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            self._key(table.namespace, table.keys, index, content)
            parent = table.keys[index - 1] if index else None
            for group in range(self.groups):
                if not self._seal_block(table, group, index, parent, content, now):
                    return
            table.sealed = index + 1

    def release(self, table: BlockTable, now: float) -> None:
        """Close a table. Tail blocks leave first, so that an idle child is always older than its parent."""
        del self._tables[id(table)]
        for blocks in table.blocks:
            for block in reversed(blocks):
                self.pool.drop(block, sealed=block in self._index, now=now)
            blocks.clear()

    def expire(self, now: float) -> int:
        """Purge what nobody used for `ttl` seconds; returns the number of blocks."""
        count = 0
        while (oldest := self.pool.oldest_idle()) and oldest[1] + self.sessions.ttl <= now:
            self._purge(oldest[0])
            count += 1
        self.expirations += count
        return count

    def next_expiry(self) -> float | None:
        """When `expire` has work again."""
        oldest = self.pool.oldest_idle()
        return oldest[1] + self.sessions.ttl if oldest else None

    def purge(self, namespace: bytes | None = None) -> int:
        """Purge the idle blocks of a namespace, or of all; returns the number of blocks."""
        doomed = [
            block
            for block in self.pool.idle_blocks()
            if namespace is None or self._index.entry(block).namespace == namespace
        ]
        for block in doomed:
            self._purge(block)
        return len(doomed)

    def report(self) -> PoolReport:
        """The pool by state."""
        pool = self.pool
        return PoolReport(pool.total, pool.free, pool.held, pool.idle, pool.dirty, self.block_size)

    def owned_blocks(self, table: BlockTable) -> int:
        """Blocks that `table` holds alone."""
        return sum(self.pool.refs[block] == 1 for blocks in table.blocks for block in blocks)

    def audit(self, now: float) -> int:
        """Compare references with the tables and repair what differs; returns how many blocks did."""
        wrong = 0
        counts = self._references()
        for block in range(self.total):
            refs = counts.get(block, 0)
            if self.pool.refs[block] != refs and self.pool.states[block] is State.HELD:
                self.pool.resettle(block, refs, sealed=block in self._index, now=now)
                wrong += 1
        self.leaked += wrong
        return wrong

    def check(self) -> None:
        """Recompute every invariant from scratch; AssertionError names what is broken."""
        self.pool.check()
        self._index.check()
        counts = self._references()
        for block in range(self.total):
            assert self.pool.refs[block] == counts.get(block, 0), f"block {block} has wrong references"
        indexed: Counter[bytes] = Counter()
        for block, entry in self._index.items():
            assert self.pool.states[block] in (State.HELD, State.IDLE), f"indexed block {block} is out of use"
            indexed[entry.namespace] += 1
        assert all(block in self._index for block in self.pool.idle_blocks()), "an idle block is not indexed"
        assert {name: blocks for name, blocks, _ in self.sessions.rows(0.0)} == dict(indexed)
        for table in self._tables.values():
            assert len({len(blocks) for blocks in table.blocks}) == 1
            assert table.sealed <= len(table)
            for blocks in table.blocks:
                for block in blocks:
                    foreign = block in self._index and self._index.entry(block).namespace != table.namespace
                    assert not foreign, f"block {block} is read across namespaces"

    def _lookup(
        self, namespace: bytes, tokens: Sequence[int], keys: list[BlockKey], now: float
    ) -> tuple[list[int], ...]:
        hits: tuple[list[int], ...] = tuple([] for _ in range(self.groups))
        if not self._prefix_cache or not self.sessions.blocks(namespace):
            return hits
        for index in range((len(tokens) - 1) // self.block_size):
            content = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            key = self._key(namespace, keys, index, content)
            found = [self._find(group, key, content, now) for group in range(self.groups)]
            if None in found:
                break
            for group, block in zip(hits, found, strict=True):
                if block is not None:
                    group.append(block)
        return hits

    def _key(self, namespace: bytes, keys: list[BlockKey], index: int, content: tuple[int, ...]) -> BlockKey:
        if len(keys) <= index:
            keys.append(chain_key(keys[-1] if keys else chain_root(namespace, self._scheme), content))
        return keys[index]

    def _missing(self, table: BlockTable, stop: int) -> int:
        return max(0, -(-stop // self.block_size) - len(table))

    def _shared_tail(self, table: BlockTable, start: int) -> list[tuple[int, int]]:
        first = start // self.block_size
        return [
            (group, index)
            for group, blocks in enumerate(table.blocks)
            for index in range(first, len(blocks))
            if self.pool.refs[blocks[index]] > 1
        ]

    def _find(self, group: int, key: BlockKey, content: tuple[int, ...], now: float) -> int | None:
        block = self._index.find(group, key, content)
        if block is None:
            return None
        since = self.pool.idle_since(block)
        if since is not None and since + self.sessions.ttl <= now:
            return None
        return block

    def _take(self, count: int) -> list[int] | None:
        if count > self.pool.ready + self.pool.idle:
            return None
        while self.pool.ready < count:
            block = self.pool.evictable()
            if block is None:
                return None
            self._forget(block)
            self.pool.evict(block)
            self.evictions += 1
        return [block for block in (self.pool.take() for _ in range(count)) if block is not None]

    def _seal_block(
        self, table: BlockTable, group: int, index: int, parent: BlockKey | None, content: tuple[int, ...], now: float
    ) -> bool:
        block, key = table.blocks[group][index], table.keys[index]
        if block in self._index:
            return True
        twin = self._index.find(group, key, content)
        if twin is not None:
            self._replace(block, twin, group, index, now)
            return True
        if self._index.occupied(group, key) or (parent is not None and not self._index.occupied(group, parent)):
            return False
        self._index.add(block, Entry(group, key, parent, content, table.namespace))
        self.sessions.grew(table.namespace, now)
        return True

    def _replace(self, block: int, twin: int, group: int, index: int, now: float) -> None:
        for table in self._tables.values():
            blocks = table.blocks[group]
            if index < len(blocks) and blocks[index] == block:
                self.pool.hold(twin)
                blocks[index] = twin
                self.pool.drop(block, sealed=False, now=now)

    def _purge(self, block: int) -> None:
        self._forget(block)
        self.pool.soil(block)

    def _forget(self, block: int) -> None:
        self.sessions.shrank(self._index.remove(block).namespace)

    def _references(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for table in self._tables.values():
            for blocks in table.blocks:
                counts.update(blocks)
        return counts
