"""ReferenceAttention: plain torch on any device. Gathers each row's slots, then multiplies in fp32.

One-token rows go together: gather, then batched products with the query heads of a KV head as rows. Longer rows go one
by one through torch's scaled_dot_product_attention. A row's gather names only slots below its length: shorter rows of a
bucket repeat their last slot and mask it, so that what lies in unused slots is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstore.layout import Precision
from workers.attention import formats
from workers.attention.backend import AttentionRule
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.rotation import rotate

BUCKET_SLOTS = 32_768
"""Slots that one gather names at most (unless a single row has more): bounds a step's working memory."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """One-token rows of similar length. `rows` int64 [B] or None for the whole batch in order; `index` into the pool's
    slots, flat [B, heads, L]; `mask` fp32 [B * heads, 1, L], 0 or -inf; `length` = L."""

    rows: Tensor | None
    index: Tensor
    mask: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens. `index` flat [heads, L]; `mask` fp32 [count, L], None when causal from 0."""

    first: int
    count: int
    index: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step as one layer group sees it. `write`: where its tokens go, int64 [T * heads]. `narrow` (slots as they are
    stored, uint8) and `wide` (fp32, [2, largest gather, head_dim]) take one gather at a time. They are made once per
    step, as fresh memory for every layer would cost more than the copy into it."""

    write: Tensor
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]
    narrow: Tensor
    wide: Tensor

    def read(self, pool: KVPool, layer: int, index: Tensor) -> list[Tensor]:
        """Keys and values of `layer` at `index` in fp32, each [len(index), head_dim]; valid until the next read."""
        kept = pool.layout.layers[layer]
        narrow = self.narrow[: len(index) * kept.slot_bytes].view(-1, kept.slot_bytes)
        pool.gather(layer, index, narrow)
        parts = narrow.split([vector.bytes for vector in kept.vectors], -1)
        return [
            formats.decode(part, vector.precision, wide[: len(index)])
            for part, vector, wide in zip(parts, kept.vectors, self.wide, strict=True)
        ]


class ReferenceAttention:
    """The backend over `pool` for heads of pool.head_dim, one rule per layer."""

    name = "reference"

    def __init__(self, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        if any((rule.softcap, rule.window, rule.sinks) != (None,) * 3 for rule in rules):
            raise Unsupported("reference attention knows neither windows nor soft-capping nor sinks")
        self._pool = pool
        self._rules = rules
        self._widest = max(layer.slot_bytes for layer in pool.layout.layers)
        self._decodes = pool.layout.precisions != {Precision.FP32}

    def prepare(self, batch: Batch) -> tuple[_Rows, ...]:
        """Indices and masks of one step, for each layer group."""
        return tuple(self._rows(batch, group) for group in range(len(self._pool.windows)))

    def _rows(self, batch: Batch, group: int) -> _Rows:
        single = [span for span in batch.spans if span.count == 1]
        decodes = tuple(self._decode(rows, len(batch.tokens), group) for rows in _buckets(single))
        chunks = tuple(self._chunk(span, group) for span in batch.spans if span.count > 1)
        gathers = [decode.index for decode in decodes] + [chunk.index for chunk in chunks]
        size = max(len(index) for index in gathers)
        pool = self._pool
        narrow = torch.empty(size * self._widest, dtype=torch.uint8, device=pool.device)
        wide = torch.empty(2, size if self._decodes else 0, pool.head_dim, device=pool.device)
        return _Rows(pool.rows(batch.slots(group)).view(-1), decodes, chunks, narrow, wide)

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(step, tuple)
        pool = self._pool
        rows: _Rows = step[pool.group_of[layer]]
        each = heads.unflatten(-1, (-1, pool.head_dim))
        first = each.shape[1] - 2 * pool.heads
        if turns is not None:
            rotate(each[:, : first + pool.heads], turns)
        query = each[:, :first]
        self._store(layer, each[:, first:].unflatten(1, (2, -1)).unbind(1), rows)
        if len(rows.decodes) == 1 and rows.decodes[0].rows is None:
            return self._attend_decode(rows, layer, query, rows.decodes[0])
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for decode in rows.decodes:
            assert decode.rows is not None
            out[decode.rows] = self._attend_decode(rows, layer, query.index_select(0, decode.rows), decode)
        for chunk in rows.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            out[part] = self._attend_chunk(rows, layer, query[part], chunk)
        return out

    def _store(self, layer: int, parts: Sequence[Tensor], step: _Rows) -> None:
        """Keys and values [T, heads, head_dim] into their slots."""
        kept = self._pool.layout.layers[layer]
        fresh = [formats.encode(part, vector.precision) for part, vector in zip(parts, kept.vectors, strict=True)]
        self._pool.scatter(layer, step.write, torch.cat(fresh, -1).view(-1, kept.slot_bytes))

    def _attend_decode(self, step: _Rows, layer: int, query: Tensor, decode: _Decode) -> Tensor:
        """[B, q_heads, head_dim] → [B, q_heads * head_dim]."""
        heads, dim = self._pool.heads, self._pool.head_dim
        rows = query.shape[0]
        keys, values = (part.unflatten(0, (rows * heads, -1)) for part in step.read(self._pool, layer, decode.index))
        grouped = query.float().reshape(rows * heads, -1, dim)
        scores = torch.baddbmm(decode.mask, grouped, keys.transpose(1, 2), alpha=self._rules[layer].scale)
        return torch.bmm(scores.softmax(-1), values).view(rows, -1).to(query.dtype)

    def _attend_chunk(self, step: _Rows, layer: int, query: Tensor, chunk: _Chunk) -> Tensor:
        """[count, q_heads, head_dim] → [count, q_heads * head_dim]."""
        keys, values = (
            part.unflatten(0, (1, self._pool.heads, -1)) for part in step.read(self._pool, layer, chunk.index)
        )
        out = scaled_dot_product_attention(
            query.float().transpose(0, 1)[None],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._rules[layer].scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(chunk.count, -1).to(query.dtype)

    def _decode(self, spans: Sequence[Span], tokens: int, group: int) -> _Decode:
        pool = self._pool
        length = max(span.length for span in spans)
        blocks = -(-length // pool.block_size)
        # A short table is filled up with its own first block: the clamp below never reaches the filling.
        tables = torch.tensor(
            [(span.tables[group] + span.tables[group][:1] * blocks)[:blocks] for span in spans],
            dtype=torch.int64,
            device=pool.device,
        )
        lengths = torch.tensor([span.length for span in spans], device=pool.device)
        steps = torch.arange(length, device=pool.device)
        places = torch.minimum(steps, (lengths - 1)[:, None])
        slots = tables.gather(1, places // pool.block_size) * pool.block_size + places % pool.block_size
        index = pool.rows(slots).view(len(spans), length, pool.heads).permute(0, 2, 1).reshape(-1)
        mask = torch.zeros(slots.shape, device=pool.device).masked_fill_(steps >= lengths[:, None], float("-inf"))
        mask = mask.repeat_interleave(pool.heads, 0)[:, None]
        firsts = [span.first for span in spans]
        whole = firsts == list(range(tokens))
        return _Decode(None if whole else torch.tensor(firsts, device=pool.device), index, mask, length)

    def _chunk(self, span: Span, group: int) -> _Chunk:
        pool = self._pool
        table = torch.tensor(span.tables[group], device=pool.device)
        places = torch.arange(span.length, device=pool.device)
        slots = table[places // pool.block_size] * pool.block_size + places % pool.block_size
        index = pool.rows(slots).view(span.length, pool.heads).permute(1, 0).reshape(-1)
        mask = None
        if span.start:
            mask = torch.zeros(span.count, span.length, device=pool.device)
            mask.masked_fill_(places > places[span.start :, None], float("-inf"))
        return _Chunk(span.first, span.count, index, mask)


def _buckets(spans: Sequence[Span]) -> list[list[Span]]:
    """Rows of similar length together: a row joins while the padding stays small and the gather within its bound.

    One bucket in the batch's own order is kept as it is, which saves the reordering.
    """
    if not spans:
        return []
    longest = max(span.length for span in spans)
    padding = longest * len(spans) - sum(span.length for span in spans)
    if longest * len(spans) <= BUCKET_SLOTS and (padding <= 2048 or padding * 4 <= longest * len(spans)):
        return [list(spans)]
    buckets: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: -span.length):
        head = buckets[-1][0].length if buckets else 0
        if head and span.length * 4 >= head * 3 and head * (len(buckets[-1]) + 1) <= BUCKET_SLOTS:
            buckets[-1].append(span)
        else:
            buckets.append([span])
    return buckets
