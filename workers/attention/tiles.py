"""Tiles: which slots of the pool a step's rows read, a bounded number at a time. It knows a step's rows and their
tables; not what slots hold, nor what is made of it.

One-token rows of similar length go together, longer rows one by one. Only slots below a row's length are named, and in
a layer group with a window none before the first that the row's tokens see: shorter rows of a bucket repeat their last
slot and hide it.

Layers with keys by channel read those of a token's own block elsewhere (see workers.attention.openblocks): the tiles of
one-token rows say which keys that is; longer rows have tiles for what is sealed, and others for what is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.openblocks import OpenKeys, ScaleRows, places
from workers.batch import Span
from workers.kvpool import KVPool

BUCKET_SLOTS = 32_768
"""Tokens that one gather of one-token rows names at most, over all rows."""
TILE = 256
"""Tokens that one gather of a longer row names at most: few, as those above the causal diagonal are wasted."""
BLOCK = 256
"""Tokens of a longer row whose scores lie in memory at a time."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Positions [first, stop) of a row, or, of several rows, counted from where each begins to see. `index` int64, flat
    [rows * heads, stop - first], names rows of the pool's slots; `hidden` bool [rows * heads, 1, 1, stop - first] says
    what is not to be seen, None: nothing. `opened`: where those of its keys lie that are open to the row, should the
    layer keep keys by channel; of a longer row all or none. `scales`: for such a layer, where the scales of the others
    lie."""

    first: int
    stop: int
    index: Tensor
    hidden: Tensor | None = None
    opened: OpenKeys | None = None
    scales: ScaleRows | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """One-token rows. `rows` int64 [B]: their tokens' places in the batch, None for the whole batch in order."""

    rows: Tensor | None
    count: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens: `count` of them from `first` of the batch on, at positions `start`, start + 1, … Where
    keys are by channel in blocks of `size` tokens, `tiles` are for what is sealed, `open_tiles` for what is open."""

    first: int
    count: int
    start: int
    tiles: tuple[Tile, ...]
    open_tiles: tuple[Tile, ...] = ()

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """[begin, end) of the tokens whose scores are made together."""
        edges = range(0, self.count, BLOCK)
        return tuple((begin, min(begin + BLOCK, self.count)) for begin in edges)

    def sees(self, block: tuple[int, int], tile: Tile, window: int | None, size: int | None = None) -> bool:
        """Whether some token of `block` sees something of `tile`; `size`: that of blocks, where keys are by channel."""
        first, last = self.start + block[0], self.start + block[1] - 1
        if size is not None:
            if tile.opened and tile.stop <= first // size * size:
                return False
            last = last if tile.opened else last // size * size - 1
        return tile.first <= last and (window is None or tile.stop - 1 > first - window)

    def hidden(self, block: tuple[int, int], tile: Tile, window: int | None, size: int | None = None) -> Tensor | None:
        """What the tokens of `block` do not see of `tile`: bool [1, tokens, 1, width], None: nothing."""
        first, last = self.start + block[0], self.start + block[1] - 1
        edge = window is not None and tile.first <= last - window
        if not edge and not tile.opened and tile.stop - 1 <= (first if size is None else first // size * size - 1):
            return None
        keys = torch.arange(tile.first, tile.stop, device=tile.index.device)
        queries = torch.arange(first, last + 1, device=tile.index.device)[:, None]
        hidden = keys > queries
        if size is not None:
            own = keys // size == queries // size
            hidden |= ~own if tile.opened else own
        if edge and window is not None:
            hidden |= keys <= queries - window
        return hidden[None, :, None]


def decodes(
    pool: KVPool, spans: Sequence[Span], tokens: int, group: int, halves: tuple[int, ...] = ()
) -> tuple[Decode, ...]:
    """The one-token rows among `spans`, of a batch of `tokens`, as the layers of `group` read them, whose open keys are
    in the groups `halves`."""
    single = [span for span in spans if span.count == 1]
    return tuple(_decode(pool, bucket, tokens, group, halves) for bucket in _buckets(single, pool.windows[group]))


def chunks(pool: KVPool, spans: Sequence[Span], group: int, halves: tuple[int, ...] = ()) -> tuple[Chunk, ...]:
    """The longer rows among `spans`, likewise."""
    return tuple(_chunk(pool, span, group, halves) for span in spans if span.count > 1)


def _decode(pool: KVPool, spans: Sequence[Span], tokens: int, group: int, halves: tuple[int, ...]) -> Decode:
    window, size, device = pool.windows[group], pool.block_size, pool.device
    seen = [_seen(span, window) for span in spans]
    width = max(seen)
    blocks = -(-max(span.length for span in spans) // size)
    # A short table is filled up with its own last block: the clamp below never reaches the filling.
    kinds = [[_filled(span.tables[one], blocks) for span in spans] for one in (group, *halves)]
    tables, *opened = torch.tensor(kinds, dtype=torch.int64, device=device)
    begins = torch.tensor([span.length - count for span, count in zip(spans, seen, strict=True)], device=device)
    counts = torch.tensor(seen, device=device)
    tiles = []
    for first, stop in _cuts(0, width, max(1, BUCKET_SLOTS // len(spans))):
        steps = torch.arange(first, stop, device=device)
        where = torch.minimum(steps, (counts - 1)[:, None]) + begins[:, None]
        slots = tables.gather(1, where // size) * size + where % size
        index = pool.rows(slots).view(len(spans), stop - first, pool.heads).permute(0, 2, 1).reshape(-1)
        hidden = None
        if min(seen) < stop:
            hidden = (steps >= counts[:, None]).repeat_interleave(pool.heads, 0)[:, None, None]
        keys = scales = None
        if opened:
            fresh = where // size == (begins + counts - 1)[:, None] // size
            keys, scales = _opened(pool, opened, where, fresh), ScaleRows.of(pool, index)
        tiles.append(Tile(first, stop, index, hidden, keys, scales))
    firsts = [span.first for span in spans]
    rows = None if firsts == list(range(tokens)) else torch.tensor(firsts, device=device)
    return Decode(rows, len(spans), tuple(tiles))


def _filled(table: tuple[int, ...], blocks: int) -> tuple[int, ...]:
    return (table + table[-1:] * blocks)[:blocks]


def _chunk(pool: KVPool, span: Span, group: int, halves: tuple[int, ...]) -> Chunk:
    window, size, device = pool.windows[group], pool.block_size, pool.device
    begin = 0 if window is None else max(0, span.start - window + 1)
    table = torch.tensor(span.tables[group], device=device)
    opened = [torch.tensor([span.tables[half]], device=device) for half in halves]

    def tile(first: int, stop: int, fresh: bool) -> Tile:
        where = torch.arange(first, stop, device=device)
        slots = table[where // size] * size + where % size
        index = pool.rows(slots).view(-1, pool.heads).t().reshape(-1)
        keys = _opened(pool, opened, where[None], torch.ones_like(where[None], dtype=torch.bool)) if fresh else None
        return Tile(first, stop, index, None, keys, ScaleRows.of(pool, index) if halves else None)

    sealed = tuple(tile(first, stop, False) for first, stop in _cuts(begin, span.length, TILE))
    start = max(begin, span.start // size * size)
    fresh = tuple(tile(first, stop, True) for first, stop in _cuts(start, span.length if halves else start, TILE))
    return Chunk(span.first, span.count, span.start, sealed, fresh)


def _opened(pool: KVPool, tables: Sequence[Tensor], where: Tensor, fresh: Tensor) -> OpenKeys:
    """The keys of a tile that are open, where `fresh` is true of its positions `where` (both [rows, width]); `tables`
    int64 [rows, blocks] of either half."""
    rows, columns = fresh.nonzero().unbind(1)
    blocks, offsets = places(torch.stack(tuple(tables)), rows, where[rows, columns], pool.block_size)
    heads = torch.arange(pool.heads, device=pool.device)
    index = (rows[:, None] * pool.heads + heads) * where.shape[1] + columns[:, None]
    return OpenKeys(blocks, offsets, index.view(-1))


def _cuts(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _seen(span: Span, window: int | None) -> int:
    """How many positions a one-token row sees."""
    return span.length if window is None else min(span.length, window)


def _buckets(spans: Sequence[Span], window: int | None) -> list[list[Span]]:
    """Rows that see about as much together: a row joins while the padding stays small and the gather within its bound.

    One bucket in the batch's own order is kept as it is, which saves the reordering.
    """
    if not spans:
        return []
    seen = {span.first: _seen(span, window) for span in spans}
    longest = max(seen.values())
    padding = longest * len(spans) - sum(seen.values())
    if longest * len(spans) <= BUCKET_SLOTS and (padding <= 2048 or padding * 4 <= longest * len(spans)):
        return [list(spans)]
    buckets: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: -seen[span.first]):
        head = seen[buckets[-1][0].first] if buckets else 0
        if head and seen[span.first] * 4 >= head * 3 and head * (len(buckets[-1]) + 1) <= BUCKET_SLOTS:
            buckets[-1].append(span)
        else:
            buckets.append([span])
    return buckets
