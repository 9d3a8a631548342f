"""LatentAttention: MLA (DeepSeek-V2, arXiv 2405.04434 section 2.1) in plain torch on any device, over a pool that keeps
one latent and one rotated key per token for all heads.

There are two ways to the same numbers. Absorbed: queries go through the matrix of keys, are multiplied with latents,
and what they gather goes through the matrix of values; so it is for one-token rows and for short chunks. Expanded: a
tile's latents become keys and values of every head; so it is for chunks whose many queries make this the cheaper one.
Both go over the context in tiles with a running softmax (arXiv 1805.02867): what a chunk takes beside the pool does not
grow with the context. A gather names only slots below its row's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.attention import formats
from workers.attention.backend import AttentionRule, Expansion
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.rotation import rotate

CHUNK_TILE = 256
"""Tokens of context that a chunk looks at in one go."""
ROWS_TILE = 8192
"""Slots that one gather for one-token rows names at most (unless there are more than a sixteenth as many rows)."""


@dataclass(frozen=True, slots=True)
class _RowsTile:
    """Part of the context of the first `rows` of some rows: `index` int64 [rows * t], `mask` fp32 [rows, 1, t] is 0, or
    -inf where a row is over; None where none is."""

    rows: int
    index: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """All one-token rows of a step, the longest first; `firsts` int64 [B] are their tokens."""

    firsts: Tensor
    tiles: tuple[_RowsTile, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens; `slots` int64 [length] are those of its context."""

    first: int
    count: int
    start: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """`write`: where the step's tokens go, int64 [T]. `narrow` (slots as they are stored, uint8) and `wide` (fp32 [most
    slots of a tile, latent + rotated]) take one gather at a time."""

    write: Tensor
    rows: _Rows | None
    chunks: tuple[_Chunk, ...]
    narrow: Tensor
    wide: Tensor


class LatentAttention:
    """The backend over `pool`, whose layers all keep latents; one rule per layer, each with an expansion."""

    name = "latent"

    def __init__(self, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        if any((rule.softcap, rule.window, rule.sinks) != (None,) * 3 for rule in rules):
            raise Unsupported("attention over MLA's latents knows neither windows nor soft-capping nor sinks")
        if not pool.joint or any(rule.expansion is None for rule in rules):
            raise ValueError("latent attention wants a pool of latents, and an expansion in every rule")
        self._pool = pool
        self._rules = rules
        self._rank, self._rope = (vector.elements for vector in pool.layout.layers[0].vectors)
        self._widest = max(layer.slot_bytes for layer in pool.layout.layers)

    def prepare(self, batch: Batch) -> _Step:
        """Indices and masks of one step."""
        single = [span for span in batch.spans if span.count == 1]
        rows = self._rows(single) if single else None
        chunks = tuple(self._chunk(span) for span in batch.spans if span.count > 1)
        sizes = [len(tile.index) for tile in rows.tiles] if rows else []
        most = max([*sizes, *(min(CHUNK_TILE, len(chunk.slots)) for chunk in chunks)])
        device = self._pool.device
        narrow = torch.empty(most * self._widest, dtype=torch.uint8, device=device)
        wide = torch.empty(most, self._rank + self._rope, device=device)
        return _Step(batch.slots(0), rows, chunks, narrow, wide)

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(step, _Step)
        rule, kept = self._rules[layer], self._rank + self._rope
        expansion = rule.expansion
        assert expansion is not None
        queries = heads[:, :-kept].unflatten(-1, (len(expansion.keys), -1))
        latents = heads[:, -kept:]
        if turns is not None:
            rotate(queries[..., -self._rope :], turns)
            rotate(latents[:, None, self._rank :], turns)
        self._store(layer, latents, step)
        out = heads.new_empty(len(heads), len(expansion.values), expansion.values.shape[1])
        if step.rows is not None:
            firsts = step.rows.firsts
            out[firsts] = self._attend_rows(layer, queries[firsts], step, step.rows)
        for chunk in step.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            mine = queries[part].transpose(0, 1)
            attend = self._attend_expanded if self._expands(expansion, chunk.count) else self._attend_absorbed
            out[part] = attend(layer, mine, step, chunk).transpose(0, 1)
        return out.flatten(1)

    def _store(self, layer: int, latents: Tensor, step: _Step) -> None:
        """Latents and rotated keys [T, rank + rope] into their slots."""
        parts = latents.split((self._rank, self._rope), -1)
        vectors = self._pool.layout.layers[layer].vectors
        fresh = [formats.encode(part, vector.precision) for part, vector in zip(parts, vectors, strict=True)]
        self._pool.scatter(layer, step.write, torch.cat(fresh, -1))

    def _read(self, layer: int, index: Tensor, step: _Step) -> Tensor:
        """Latents and rotated keys at `index`, fp32 [len(index), rank + rope]; valid until the next read."""
        kept = self._pool.layout.layers[layer]
        narrow = step.narrow[: len(index) * kept.slot_bytes].view(-1, kept.slot_bytes)
        self._pool.gather(layer, index, narrow)
        wide = step.wide[: len(index)]
        parts = narrow.split([vector.bytes for vector in kept.vectors], -1)
        places = wide.split((self._rank, self._rope), -1)
        for part, vector, place in zip(parts, kept.vectors, places, strict=True):
            decoded = formats.decode(part, vector.precision, place)
            if decoded is not place:  # fp32, where it lay
                place.copy_(decoded)
        return wide

    def _attend_rows(self, layer: int, queries: Tensor, step: _Step, rows: _Rows) -> Tensor:
        """[B, heads, nope + rope] → [B, heads, elements of a value]."""
        expansion = self._expansion(layer)
        seen = _absorbed(queries.transpose(0, 1), expansion).transpose(0, 1).float() * self._rules[layer].scale
        softmax = _Softmax(seen.shape[:2], self._rank, seen.device)
        for tile in rows.tiles:
            latents = self._read(layer, tile.index, step).unflatten(0, (tile.rows, -1))
            scores = torch.bmm(seen[: tile.rows], latents.transpose(1, 2))
            if tile.mask is not None:
                scores.add_(tile.mask)
            softmax.add(scores, latents[..., : self._rank], (slice(tile.rows),))
        return _released(softmax.result().transpose(0, 1), expansion, queries.dtype).transpose(0, 1)

    def _attend_absorbed(self, layer: int, queries: Tensor, step: _Step, chunk: _Chunk) -> Tensor:
        """[heads, count, nope + rope] → [heads, count, elements of a value]."""
        expansion = self._expansion(layer)
        seen = _absorbed(queries, expansion).float() * self._rules[layer].scale
        softmax = _Softmax(seen.shape[:2], self._rank, seen.device)
        for begin, past in chunk_tiles(chunk.start, chunk.count):
            latents = self._read(layer, chunk.slots[begin : begin + CHUNK_TILE], step)
            scores = torch.matmul(seen[:, past:], latents.t())
            _hide(scores, begin, chunk.start + past)
            softmax.add(scores, latents[:, : self._rank], (slice(None), slice(past, None)))
        return _released(softmax.result(), expansion, queries.dtype)

    def _attend_expanded(self, layer: int, queries: Tensor, step: _Step, chunk: _Chunk) -> Tensor:
        """[heads, count, nope + rope] → [heads, count, elements of a value]."""
        expansion = self._expansion(layer)
        plain, turned = (queries.float() * self._rules[layer].scale).split((expansion.keys.shape[1], self._rope), -1)
        softmax = _Softmax(plain.shape[:2], expansion.values.shape[1], plain.device)
        for begin, past in chunk_tiles(chunk.start, chunk.count):
            both = self._read(layer, chunk.slots[begin : begin + CHUNK_TILE], step)
            latents, rotated = both[:, : self._rank].to(queries.dtype), both[:, self._rank :]
            keys, values = (_expanded(latents, matrices) for matrices in (expansion.keys, expansion.values))
            scores = torch.matmul(turned[:, past:], rotated.t()).baddbmm_(plain[:, past:], keys.transpose(1, 2))
            _hide(scores, begin, chunk.start + past)
            softmax.add(scores, values, (slice(None), slice(past, None)))
        return softmax.result().to(queries.dtype)

    def _expansion(self, layer: int) -> Expansion:
        expansion = self._rules[layer].expansion
        assert expansion is not None
        return expansion

    def _expands(self, expansion: Expansion, count: int) -> bool:
        """Whether expanding takes fewer multiplications: what a key costs by itself, against what `count` queries save
        on it. (DeepSeek-V3: from 171 queries on.)"""
        width = expansion.keys.shape[1] + expansion.values.shape[1]
        return count * (2 * self._rank - width) > self._rank * width

    def _rows(self, spans: list[Span]) -> _Rows:
        pool = self._pool
        spans = sorted(spans, key=lambda span: -span.length)
        longest = -(-spans[0].length // pool.block_size)
        # A short table is filled up with its own first block: the clamp below never reaches the filling.
        padded = [(span.tables[0] + span.tables[0][:1] * longest)[:longest] for span in spans]
        tables = torch.tensor(padded, dtype=torch.int64, device=pool.device)
        lengths = torch.tensor([span.length for span in spans], device=pool.device)
        size = max(16, ROWS_TILE // len(spans))
        tiles = []
        for begin in range(0, spans[0].length, size):
            rows = sum(span.length > begin for span in spans)
            stop = min(begin + size, spans[0].length)
            steps = torch.arange(begin, stop, device=pool.device)
            places = torch.minimum(steps, (lengths[:rows] - 1)[:, None])
            slots = tables[:rows].gather(1, places // pool.block_size) * pool.block_size + places % pool.block_size
            mask = None
            if spans[rows - 1].length < stop:
                over = steps >= lengths[:rows, None]
                mask = torch.zeros(over.shape, device=pool.device).masked_fill_(over, float("-inf"))[:, None]
            tiles.append(_RowsTile(rows, slots.flatten(), mask))
        return _Rows(torch.tensor([span.first for span in spans], device=pool.device), tuple(tiles))

    def _chunk(self, span: Span) -> _Chunk:
        pool = self._pool
        table = torch.tensor(span.tables[0], device=pool.device)
        places = torch.arange(span.length, device=pool.device)
        slots = table[places // pool.block_size] * pool.block_size + places % pool.block_size
        return _Chunk(span.first, span.count, span.start, slots)


class _Softmax:
    """Values weighted by the softmax of scores that come tile by tile, for queries [a, b], in fp32."""

    def __init__(self, queries: Sequence[int], width: int, device: torch.device) -> None:
        self._most = torch.full((*queries, 1), float("-inf"), device=device)
        self._total = torch.zeros((*queries, 1), device=device)
        self._sum = torch.zeros((*queries, width), device=device)

    def add(self, scores: Tensor, values: Tensor, where: tuple[slice, ...]) -> None:
        """Scores [a, b, t] of the queries at `where`, which are used up, and values [a, t, width] or [t, width]. Each
        query sees some token of the first tile that it gets."""
        most, total, weighted = (part[where] for part in (self._most, self._total, self._sum))
        highest = torch.maximum(most, scores.amax(-1, keepdim=True))
        shrink = most.sub_(highest).exp_()
        weights = scores.sub_(highest).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(shrink).add_(torch.matmul(weights, values))
        most.copy_(highest)

    def result(self) -> Tensor:
        """[a, b, width]."""
        return self._sum.div_(self._total)


def chunk_tiles(start: int, count: int) -> list[tuple[int, int]]:
    """(first position of a tile, first token of the chunk that sees any of it), for `count` tokens from `start` on."""
    return [(begin, max(0, begin - start)) for begin in range(0, start + count, CHUNK_TILE)]


def _hide(scores: Tensor, begin: int, first: int) -> None:
    """-inf for tokens, from position `begin` on, that come after their query; queries stand from `first` on."""
    if begin + scores.shape[2] <= first + 1:
        return
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)
    tokens = torch.arange(begin, begin + scores.shape[2], device=scores.device)
    scores.masked_fill_(tokens > queries[:, None], float("-inf"))


def _absorbed(queries: Tensor, expansion: Expansion) -> Tensor:
    """Queries [heads, n, nope + rope] as latents see them: [heads, n, rank + rope]."""
    nope = expansion.keys.shape[1]
    return torch.cat((torch.bmm(queries[..., :nope], expansion.keys), queries[..., nope:]), -1)


def _released(gathered: Tensor, expansion: Expansion, dtype: torch.dtype) -> Tensor:
    """Latents gathered by queries [heads, n, rank], as values [heads, n, elements of a value]."""
    return torch.bmm(gathered.to(dtype), expansion.values.transpose(1, 2))


def _expanded(latents: Tensor, matrices: Tensor) -> Tensor:
    """[t, rank] through [heads, elements, rank]: fp32 [heads, t, elements]."""
    return linear(latents, matrices.flatten(0, 1)).unflatten(-1, matrices.shape[:2]).transpose(0, 1).float()
