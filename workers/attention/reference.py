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

from workers.attention.int8 import dequantise, quantise
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.rotation import rotate

BUCKET_SLOTS = 32_768
"""Slots that one gather names at most (unless a single row has more): bounds a step's working memory."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """One-token rows of similar length. `rows` int64 [B] or None for the whole batch in order; `index` into the pool's
    vectors, flat [2, B, heads, L]; `mask` fp32 [B * heads, 1, L], 0 or -inf; `length` = L."""

    rows: Tensor | None
    index: Tensor
    mask: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens. `index` flat [2, heads, L]; `mask` fp32 [count, L], None when causal from 0."""

    first: int
    count: int
    index: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Step:
    """`write`: where the step's keys and values go, int64 [T * 2 * heads]. `narrow` (the pool's vectors) and `wide`
    (fp32; the same memory where the pool is fp32) take one gather at a time, [largest gather, head_dim]. They are made
    once per step, as fresh memory for every layer would cost more than the copy into it."""

    write: Tensor
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]
    narrow: Tensor
    wide: Tensor

    def read(self, vectors: Tensor, index: Tensor) -> Tensor:
        """vectors[index] in fp32, [len(index), head_dim]; valid until the next read."""
        narrow, wide = self.narrow[: len(index)], self.wide[: len(index)]
        torch.index_select(vectors, 0, index, out=narrow)
        if narrow.dtype == torch.int8:
            return dequantise(narrow, wide)
        return wide if self.wide is self.narrow else wide.copy_(narrow)


class ReferenceAttention:
    """The backend over `pool` for heads of pool.head_dim; softmax scale 1 / sqrt(head_dim)."""

    name = "reference"

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._scale = pool.head_dim**-0.5

    def prepare(self, batch: Batch) -> _Step:
        """Indices and masks of one step."""
        single = [span for span in batch.spans if span.count == 1]
        decodes = tuple(self._decode(rows, len(batch.tokens)) for rows in _buckets(single))
        chunks = tuple(self._chunk(span) for span in batch.spans if span.count > 1)
        gathers = [decode.index for decode in decodes] + [chunk.index for chunk in chunks]
        size = max(len(index) for index in gathers)
        pool = self._pool
        narrow = wide = torch.empty(size, pool.width, dtype=pool.dtype, device=pool.device)
        if pool.dtype != torch.float32:
            wide = torch.empty(size, pool.head_dim, dtype=torch.float32, device=pool.device)
        return _Step(pool.rows(batch.slots).view(-1), decodes, chunks, narrow, wide)

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(step, _Step)
        pool = self._pool
        each = heads.unflatten(-1, (-1, pool.head_dim))
        first = each.shape[1] - 2 * pool.heads
        if turns is not None:
            rotate(each[:, : first + pool.heads], turns)
        query, kv = each[:, :first], each[:, first:]
        vectors = pool.vectors(layer)
        fresh = quantise(kv.float()) if pool.dtype == torch.int8 else kv.to(pool.dtype)
        vectors.index_copy_(0, step.write, fresh.reshape(-1, pool.width))
        if len(step.decodes) == 1 and step.decodes[0].rows is None:
            return self._attend_decode(step, vectors, query, step.decodes[0])
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for decode in step.decodes:
            assert decode.rows is not None
            out[decode.rows] = self._attend_decode(step, vectors, query.index_select(0, decode.rows), decode)
        for chunk in step.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            out[part] = self._attend_chunk(step, vectors, query[part], chunk)
        return out

    def _attend_decode(self, step: _Step, vectors: Tensor, query: Tensor, decode: _Decode) -> Tensor:
        """[B, q_heads, head_dim] → [B, q_heads * head_dim]."""
        heads, dim = self._pool.heads, self._pool.head_dim
        rows = query.shape[0]
        keys, values = step.read(vectors, decode.index).view(2, rows * heads, decode.length, dim).unbind(0)
        grouped = query.float().reshape(rows * heads, -1, dim)
        scores = torch.baddbmm(decode.mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values).view(rows, -1).to(query.dtype)

    def _attend_chunk(self, step: _Step, vectors: Tensor, query: Tensor, chunk: _Chunk) -> Tensor:
        """[count, q_heads, head_dim] → [count, q_heads * head_dim]."""
        heads, dim = self._pool.heads, self._pool.head_dim
        keys, values = step.read(vectors, chunk.index).view(2, 1, heads, -1, dim).unbind(0)
        out = scaled_dot_product_attention(
            query.float().transpose(0, 1)[None],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(chunk.count, -1).to(query.dtype)

    def _decode(self, spans: Sequence[Span], tokens: int) -> _Decode:
        pool = self._pool
        length = max(span.length for span in spans)
        blocks = -(-length // pool.block_size)
        # A short table is filled up with its own first block: the clamp below never reaches the filling.
        tables = torch.tensor(
            [(span.table + span.table[:1] * blocks)[:blocks] for span in spans], dtype=torch.int64, device=pool.device
        )
        lengths = torch.tensor([span.length for span in spans], device=pool.device)
        steps = torch.arange(length, device=pool.device)
        places = torch.minimum(steps, (lengths - 1)[:, None])
        slots = tables.gather(1, places // pool.block_size) * pool.block_size + places % pool.block_size
        index = pool.rows(slots).view(len(spans), length, 2, pool.heads).permute(2, 0, 3, 1).reshape(-1)
        mask = torch.zeros(slots.shape, device=pool.device).masked_fill_(steps >= lengths[:, None], float("-inf"))
        mask = mask.repeat_interleave(pool.heads, 0)[:, None]
        firsts = [span.first for span in spans]
        whole = firsts == list(range(tokens))
        return _Decode(None if whole else torch.tensor(firsts, device=pool.device), index, mask, length)

    def _chunk(self, span: Span) -> _Chunk:
        pool = self._pool
        table = torch.tensor(span.table, device=pool.device)
        places = torch.arange(span.length, device=pool.device)
        slots = table[places // pool.block_size] * pool.block_size + places % pool.block_size
        index = pool.rows(slots).view(span.length, 2, pool.heads).permute(1, 2, 0).reshape(-1)
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
