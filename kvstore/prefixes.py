"""PrefixCache: what of a sequence is cached, for whom and for how long: lookup, sealing, expiry, quotas, purges.

Joins the index (contents), the sessions (who) and retention (until when) over a pool; knows no tables. The keys of a
chain are rooted in its namespace; where its head is public, in the public one, and the session's chain branches off.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvstore.chain import BlockKey, branch_root, chain_key, chain_root
from kvstore.extent import Extent
from kvstore.index import Entry, PrefixIndex
from kvstore.pool import BlockPool, State
from kvstore.retention import Retention
from kvstore.sessions import Sessions, Terms
from kvstore.table import GONE, BlockTable

REMEMBERED = 32_768
"""How many keys of expired blocks are remembered, to count what is asked for again."""
_PUBLIC = Terms()
"""The terms of a public namespace: nobody's quota, the group's own time."""


class PrefixCache:
    """Blocks of the layer groups of `extent`; unused contents live for `ttl` seconds. `evictions` counts blocks that
    left for room or for a quota, `expirations` those whose time was over.

    A group without a window is found from the start of a sequence on, so that an indexed block's parent is indexed. Of
    one with a window the blocks that the next token sees are enough, and its blocks come and go by themselves."""

    def __init__(self, pool: BlockPool, extent: Extent, ttl: float, scheme: bytes) -> None:
        self.index = PrefixIndex()
        self.sessions = Sessions(ttl)
        self.evictions = 0
        self.expirations = 0
        self._pool = pool
        self._block_size = extent.block_size
        self._extent = extent
        self._windows = extent.windows
        self._scheme = scheme
        self._retention = Retention(ttl, self.sessions.kept_until)
        self._open: Counter[int] = Counter()
        self._expired: OrderedDict[BlockKey, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.index

    def public_blocks(self, terms: Terms) -> int:
        """How many blocks at the head of a chain are public."""
        return terms.public_tokens // self._block_size if terms.public else 0

    def content(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of block `index`."""
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def key(
        self, namespace: bytes, terms: Terms, keys: list[BlockKey], index: int, content: tuple[int, ...]
    ) -> BlockKey:
        """The key of block `index`, which holds `content`; `keys` has those before it and gets it."""
        if len(keys) <= index:
            public = self.public_blocks(terms)
            if index == 0:
                parent = chain_root(terms.public if public else namespace, self._scheme)
            else:
                parent = branch_root(keys[-1], namespace) if index == public else keys[-1]
            keys.append(chain_key(parent, content))
        return keys[index]

    def lookup(
        self, namespace: bytes, terms: Terms, tokens: Sequence[int], keys: list[BlockKey]
    ) -> tuple[list[int], ...]:
        """Per layer group, the blocks with the head of `tokens`, the last token excluded. Extends `keys` as it goes."""
        found: list[list[int | None]] = []
        runs, best = [0] * len(self._windows), 0
        public = self.public_blocks(terms)
        for index in range(self._full_before_last(tokens)):
            if index in (0, public) and not self.sessions.blocks(terms.public if index < public else namespace):
                break
            content = self.content(tokens, index)
            key = self.key(namespace, terms, keys, index, content)
            row = [self.index.find(group, key, content) for group in range(len(self._windows))]
            if any(block is None and window is None for block, window in zip(row, self._windows, strict=True)):
                break
            found.append(row)
            runs = [0 if block is None else run + 1 for block, run in zip(row, runs, strict=True)]
            if all(run >= self._needed(window, index + 1) for run, window in zip(runs, self._windows, strict=True)):
                best = index + 1
        return tuple(self._head(found[:best], group) for group in range(len(self._windows)))

    def misses(self, table: BlockTable, tokens: Sequence[int]) -> tuple[int, int]:
        """Of `tokens`, behind what `table` found: how many had been cached and are expired since; how many another
        namespace has cached now, so that a wider scope would have hit."""
        hit, full = table.cached // self._block_size, self._full_before_last(tokens)
        expired = hit
        while self._expired and expired < full:
            content = self.content(tokens, expired)
            if self.key(table.namespace, table.terms, table.keys, expired, content) not in self._expired:
                break
            expired += 1
        last = table.blocks[0][hit - 1] if hit else GONE
        elsewhere, mark = hit, 0 if last == GONE else self.index.entry(last).open_hash
        if hit and last == GONE:
            return (expired - hit) * self._block_size, 0
        while elsewhere < full:
            mark = _open_hash(mark, self.content(tokens, elsewhere))
            if mark not in self._open:
                break
            elsewhere += 1
        return (expired - hit) * self._block_size, (elsewhere - hit) * self._block_size

    def add(self, table: BlockTable, group: int, index: int, content: tuple[int, ...], now: float) -> bool:
        """Index the block at `index` of `table`; False when that would break the chain."""
        key, parent = table.keys[index], table.keys[index - 1] if index else None
        before = None if parent is None else self.index.block(group, parent)
        if self._windows[group] is not None:
            parent = None
        if self.index.block(group, key) is not None or (parent is not None and before is None):
            return False
        block, owner = table.blocks[group][index], table.owner(index)
        mark = 0
        if group == 0:
            mark = _open_hash(0 if before is None else self.index.entry(before).open_hash, content)
            self._open[mark] += 1
            self._expired.pop(key, None)
        self.index.add(block, Entry(group, key, parent, content, owner, mark))
        self.sessions.grew(owner, block, _PUBLIC if index < table.public else table.terms, now)
        return True

    def touch(self, table: BlockTable, now: float) -> None:
        """What `table` may share was used at `now`."""
        self.sessions.touch(table.namespace, table.terms, now)
        if table.public:
            self.sessions.touch(table.terms.public, _PUBLIC, now)

    def rest(self, block: int, now: float) -> None:
        """`block` has just turned IDLE."""
        namespace = self.index.entry(block).namespace
        self.sessions.rest(namespace, block)
        self._retention.rest(block, namespace, now)

    def wake(self, block: int) -> None:
        """`block` is about to leave IDLE and stays indexed."""
        namespace = self.index.entry(block).namespace
        self.sessions.wake(namespace, block)
        self._retention.wake(block, namespace)

    def evict(self, block: int) -> None:
        """IDLE → FREE: another's content is about to overwrite it."""
        self._forget(block)
        self._pool.evict(block)
        self.evictions += 1

    def expire(self, now: float) -> int:
        """Purge what nobody used for its time; returns the number of blocks."""
        before = self.expirations
        for block in self._retention.over(now):
            if self.index.children(block):
                self._retention.strand(block)
            else:
                self._lapse(block)
        return self.expirations - before

    def next_expiry(self) -> float | None:
        """When `expire` has work again."""
        return self._retention.next_end()

    def live_for(self, ttl: float) -> None:
        """Unused contents live for `ttl` seconds from now on."""
        self.sessions.ttl = self._retention.ttl = ttl

    def trim(self, namespace: bytes) -> None:
        """While the namespace or its tenant is over quota, purge its oldest idle blocks."""
        while (block := self.sessions.surplus(namespace)) is not None:
            self._forget(block)
            self._pool.soil(block)
            self.evictions += 1

    def purge(self, namespace: bytes | None) -> tuple[int, bool]:
        """Forget a namespace (None: all) and what stands on it: idle blocks turn DIRTY, held ones cannot be found any
        more. Returns the number of blocks and whether some are held."""
        members = {b for b, _ in self.index.items()} if namespace is None else self.sessions.members(namespace)
        doomed, held = self.index.closure(members), False
        for block in doomed:
            if block not in self.index:
                continue  # a public head that was only waiting for the blocks behind it
            self._forget(block)
            if self._pool.states[block] is State.IDLE:
                self._pool.soil(block)
            else:
                held = True
        return len(doomed), held

    def discard(self, block: int) -> None:
        """Take a block that nobody can use out of the index, whatever its state."""
        if block in self.index:
            self._forget(block)

    def check(self) -> None:
        """Index, sessions, retention and the counts of contents agree with the pool."""
        self.index.check()
        idle = list(self._pool.idle_blocks())
        indexed = {block: entry.namespace for block, entry in self.index.items()}
        assert all(block in indexed for block in idle), "an idle block is not indexed"
        for block in indexed:
            assert self._pool.states[block] in (State.HELD, State.IDLE), f"indexed block {block} is out of use"
        self.sessions.check(indexed, idle)
        self._retention.check(set(idle))
        assert self._open == Counter(entry.open_hash for _, entry in self.index.items() if entry.group == 0)

    def _needed(self, window: int | None, blocks: int) -> int:
        """Of the first `blocks` of a sequence, how many the token behind them sees."""
        return blocks - self._extent.first_seen(window, blocks * self._block_size)

    def _head(self, found: list[list[int | None]], group: int) -> list[int]:
        """What a table gets of `found`: where the group has a window, no more than is needed."""
        gone = len(found) - self._needed(self._windows[group], len(found))
        blocks = [row[group] for row in found[gone:]]
        return [GONE] * gone + [block for block in blocks if block is not None]

    def _full_before_last(self, tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) // self._block_size

    def _lapse(self, block: int) -> None:
        self._remember(self.index.entry(block))
        self._forget(block)
        self._pool.soil(block)
        self.expirations += 1

    def _remember(self, entry: Entry) -> None:
        if entry.group == 0:
            self._expired[entry.key] = None
            if len(self._expired) > REMEMBERED:
                self._expired.popitem(last=False)

    def _forget(self, block: int) -> None:
        """Out of the index; then the stranded blocks before it, which only waited for it."""
        entry = self._drop(block)
        parent = self.index.parent(entry)
        while parent is not None and self._retention.is_stranded(parent) and not self.index.children(parent):
            entry = self.index.entry(parent)
            self._remember(entry)
            self._drop(parent)
            self._pool.soil(parent)
            self.expirations += 1
            parent = self.index.parent(entry)

    def _drop(self, block: int) -> Entry:
        entry = self.index.remove(block)
        self.sessions.shrank(entry.namespace, block)
        self._retention.wake(block, entry.namespace)
        if entry.group == 0:
            self._open[entry.open_hash] -= 1
            if not self._open[entry.open_hash]:
                del self._open[entry.open_hash]
        return entry


def _open_hash(before: int, content: tuple[int, ...]) -> int:
    """A number for a prefix whatever its namespace. Only counts depend on it, so that a cheap hash is good enough."""
    return hash((before, content))
