"""KVStore: all that a scheduler sees of KV memory. Tables of blocks, shared prefixes, copies on write, expiry.

Joins the pool (states), the prefix cache (contents and who may find them) and the holdings (open tables). Knows neither
requests nor ranks nor the clock. Full is an answer here, never an exception; assertions state invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstore.chain import BlockKey
from kvstore.extent import Extent
from kvstore.holdings import Holdings
from kvstore.message import message
from kvstore.pool import BlockPool, State
from kvstore.prefixes import PrefixCache
from kvstore.sessions import Sessions, Terms
from kvstore.table import GONE, BlockTable

Copy = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is cached: full `blocks` from its start; how many blocks of all layer groups would be `adopted`,
    `idle` of them IDLE (adopting consumes them)."""

    blocks: int
    idle: int
    adopted: int


@message
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
    """`total` blocks of `block_size` tokens for a layer group per window of `windows` (None: all is kept; those come
    first); `ttl` seconds of life for unused contents.

    Each group's tables draw from the same pool. A group with a window gets blocks only as far as they are about to be
    written, and `slide` lets go of those that no token to come sees: `ahead` tokens of a sequence may be on their way
    beyond those that are in place. `scheme` names how the bytes come about (model revision, KV precision, rope); it
    roots every key.
    """

    def __init__(
        self,
        total: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        ahead: int = 1,
        ttl: float = 300.0,
        prefix_cache: bool = True,
        scheme: bytes = b"",
    ) -> None:
        self.block_size = block_size
        self.extent = Extent(block_size, windows, ahead)
        self.windows = windows
        self.pool = BlockPool(total)
        self._sliding = tuple((group, window) for group, window in enumerate(windows) if window is not None)
        self._prefix_cache = prefix_cache
        self._cache = PrefixCache(self.pool, self.extent, ttl, scheme)
        self._holdings = Holdings(self.pool, self._cache)

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def sessions(self) -> Sessions:
        """What is cached for whom."""
        return self._cache.sessions

    @property
    def leaked(self) -> int:
        """Blocks that the audit had to repair."""
        return self._holdings.leaked

    @property
    def evictions(self) -> int:
        """Cached blocks that left for room or for a quota."""
        return self._cache.evictions

    @property
    def expirations(self) -> int:
        """Cached blocks whose time was over."""
        return self._cache.expirations

    @property
    def available(self) -> int:
        """Blocks that `grow` can get now or as soon as the steps in flight are applied: FREE and IDLE."""
        return self.pool.free + self.pool.idle

    @property
    def tables(self) -> int:
        """Tables that are open."""
        return len(self._holdings)

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has `tokens`, over all layer groups, open ones apart that a
        chunk passes through."""
        return self.extent.blocks_for(tokens)

    def match(
        self, namespace: bytes, tokens: Sequence[int], keys: list[BlockKey], now: float, terms: Terms = Terms()
    ) -> Match:
        """What `adopt` would find. Purges what is over and extends `keys`, the chain of `tokens` as far as it was
        needed before, so that nobody hashes a prompt twice; touches nothing else."""
        hits = self._lookup(namespace, terms, tokens, keys, now)
        blocks = [block for group in hits for block in group if block != GONE]
        return Match(len(hits[0]), sum(self.pool.states[block] is State.IDLE for block in blocks), len(blocks))

    def adopt(
        self, namespace: bytes, tokens: Sequence[int], keys: list[BlockKey], now: float, terms: Terms = Terms()
    ) -> BlockTable:
        """Open a table whose head is the cached prefix of `tokens`. At least the last token is left to compute. The
        table keeps `keys` as its own."""
        hits = self._lookup(namespace, terms, tokens, keys, now)
        hit, public = len(hits[0]), self._cache.public_blocks(terms)
        table = self._holdings.open(BlockTable(namespace, hits, terms, public, keys, hit, hit * self.block_size))
        self._cache.touch(table, now)
        return table

    def misses(self, table: BlockTable, tokens: Sequence[int]) -> tuple[int, int]:
        """Of `tokens`, behind what `table` found: those that expired, those that another namespace has cached now."""
        return self._cache.misses(table, tokens) if self._prefix_cache else (0, 0)

    def grow(
        self, table: BlockTable, start: int, stop: int, now: float, *, reserve: int = 0
    ) -> tuple[Copy, ...] | None:
        """Make positions [start, stop) writable: enough blocks, none of those written to shared. Groups without window
        get blocks up to position `reserve`, if that is further.

        Returns the (source, destination) copies that the next plan must make, or None, with the table unchanged, when
        the pool cannot give enough blocks now.
        """
        shared = self._shared_tail(table, start)
        missing = self._missing(table, stop, reserve)
        if not any(missing) and not shared:
            return ()
        taken = self._holdings.take(sum(missing) + len(shared))
        if taken is None:
            return None
        copies = []
        for group, index in shared:
            source, destination = table.blocks[group][index], taken.pop()
            copies.append((source, destination))
            self._holdings.replace(table, group, index, destination, now)
        for group, count in enumerate(missing):
            for _ in range(count):
                self._holdings.append(table, group, taken.pop())
        return tuple(copies)

    def slide(self, table: BlockTable, computed: int, now: float) -> None:
        """Let go of what no token from position `computed` on sees. What is cached of it stays for its time."""
        for group, window in self._sliding:
            first = self.extent.first_seen(window, computed)
            if first > table.gone[group]:
                self._holdings.slide(table, group, first, now)

    def shortage(self, table: BlockTable, start: int, stop: int) -> int:
        """Blocks that `grow` would still lack if every step in flight were applied and all that is DIRTY zeroed."""
        need = sum(self._missing(table, stop)) + len(self._shared_tail(table, start))
        return max(0, need - self.available - self.pool.dirty)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; whoever writes to a shared one first gets a copy (see `grow`)."""
        blocks = tuple(list(group) for group in table.blocks)
        return self._holdings.open(replace(table, blocks=blocks, keys=list(table.keys), gone=list(table.gone)))

    def seal(self, table: BlockTable, tokens: Sequence[int], computed: int, now: float) -> None:
        """Index the full blocks among the first `computed` tokens, whose values are in place on every rank.

        A block whose content is indexed already gives way to its twin in every table that holds it. A table that was
        forgotten keeps what it has to itself.
        """
        full = computed // self.block_size
        if not self._prefix_cache or table.forgotten or table.sealed >= full:
            return
        for index in range(table.sealed, full):
            content = self._cache.content(tokens, index)
            self._cache.key(table.namespace, table.terms, table.keys, index, content)
            for group in range(len(self.windows)):
                if not self._seal_block(table, group, index, content, now):
                    return
            table.sealed = index + 1
        self._cache.trim(table.namespace)

    def release(self, table: BlockTable, now: float) -> None:
        """Close a table: what it shared lives on for its time."""
        self._holdings.close(table, now)
        if not table.forgotten:
            self._cache.touch(table, now)
        self._cache.trim(table.namespace)

    def expire(self, now: float) -> int:
        """Purge what nobody used for its time; returns the number of blocks."""
        return self._cache.expire(now)

    def next_expiry(self) -> float | None:
        """When `expire` has work again."""
        return self._cache.next_expiry()

    def live_for(self, ttl: float) -> None:
        """Unused contents live for `ttl` seconds from now on, those that are cached already too."""
        self._cache.live_for(ttl)

    @property
    def caches_prefixes(self) -> bool:
        """Whether what is computed is cached."""
        return self._prefix_cache

    def cache_prefixes(self, on: bool) -> None:
        """Whether anything is cached from now on. What is cached stays: `purge` it before switching off."""
        self._prefix_cache = on

    def purge(self, namespace: bytes | None = None) -> int:
        """Nobody finds anything of a namespace (None: of any) from now on; returns the number of blocks. Idle ones turn
        DIRTY; what its open tables hold, and will hold, does when it is released."""
        count, held = self._cache.purge(namespace)
        for table in self._holdings:
            if namespace is None or table.namespace == namespace or (held and self._lost_some(table)):
                table.forgotten = True
        return count

    def report(self) -> PoolReport:
        """The pool by state."""
        pool = self.pool
        return PoolReport(pool.total, pool.free, pool.held, pool.idle, pool.dirty, self.block_size)

    def owned_blocks(self, table: BlockTable) -> int:
        """Blocks that `table` holds alone."""
        return self._holdings.owned(table)

    def borrowed(self, tables: Iterable[BlockTable]) -> list[int]:
        """For each table, how many blocks at its head (of the first layer group, which must have no window) a table
        before it in the list holds too."""
        return self._holdings.borrowed(tables)

    def audit(self, now: float, share: float = 1.0) -> int:
        """Compare references with the tables, `share` of the whole pool more (1: all of it, now), and repair what
        differs; returns how many blocks did."""
        return self._holdings.audit(now, share)

    def check(self) -> None:
        """Recompute every invariant from scratch; AssertionError names what is broken."""
        self.pool.check()
        self._cache.check()
        self._holdings.check()

    def _lookup(
        self, namespace: bytes, terms: Terms, tokens: Sequence[int], keys: list[BlockKey], now: float
    ) -> tuple[list[int], ...]:
        if not self._prefix_cache:
            return tuple([] for _ in self.windows)
        self._cache.expire(now)
        return self._cache.lookup(namespace, terms, tokens, keys)

    def _missing(self, table: BlockTable, stop: int, reserve: int = 0) -> list[int]:
        """Blocks that each layer group lacks."""
        near, far = (-(-end // self.block_size) for end in (stop, max(stop, reserve)))
        goals = (far if window is None else near for window in self.windows)
        return [max(0, goal - len(blocks)) for goal, blocks in zip(goals, table.blocks, strict=True)]

    def _shared_tail(self, table: BlockTable, start: int) -> list[tuple[int, int]]:
        if not self.pool.shared:
            return []
        first = start // self.block_size
        return [
            (group, index)
            for group, blocks in enumerate(table.blocks)
            for index in range(first, len(blocks))
            if self.pool.refs[blocks[index]] > 1
        ]

    def _seal_block(self, table: BlockTable, group: int, index: int, content: tuple[int, ...], now: float) -> bool:
        block = table.blocks[group][index]
        if block == GONE or block in self._cache or not self.extent.caches(group):
            return True
        twin = self._cache.index.find(group, table.keys[index], content)
        if twin is None:
            return self._cache.add(table, group, index, content, now)
        self._holdings.replace_everywhere(group, index, twin, block, now)
        return True

    def _lost_some(self, table: BlockTable) -> bool:
        """Whether a block that `table` had sealed has left the index."""
        cached = (blocks for group, blocks in enumerate(table.blocks) if self.extent.caches(group))
        sealed = (block for blocks in cached for block in blocks[: table.sealed])
        return any(block != GONE and block not in self._cache for block in sealed)
