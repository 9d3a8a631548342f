"""ReferenceAttention: plain torch on any device. Gathers a tile of slots, multiplies in fp32, goes on to the next tile.

A step's working memory does not grow with the context: a bounded number of slots is gathered at a time, and scores are
those of a bounded number of tokens over them. Batched products have the query heads of a KV head as rows, so keys and
values are never repeated. What lies in slots that a token does not see never gets into its sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.layout import Precision
from workers.attention import formats, tiles
from workers.attention.backend import AttentionRule
from workers.attention.openblocks import OpenBlocks
from workers.attention.softmax import OnlineSoftmax, capped
from workers.attention.tiles import Chunk, Decode, Tile
from workers.batch import Batch
from workers.kvpool import KVPool
from workers.rotation import rotate


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step as one layer group sees it. `write`: where its tokens go, int64 [T * heads]; `opened`: where those of its
    keys go that are by channel, if some are."""

    write: Tensor
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]
    opened: OpenBlocks | None

    @property
    def tiles(self) -> Iterator[Tile]:
        """All that are gathered, one after the other."""
        yield from (tile for decode in self.decodes for tile in decode.tiles)
        yield from (tile for chunk in self.chunks for tile in (*chunk.tiles, *chunk.open_tiles))


@dataclass(frozen=True, slots=True)
class _Step:
    """`groups`: the step as each layer group sees it. `narrow` (slots as they are stored, uint8) and `wide` (fp32, [2,
    largest gather, head_dim]) take one gather at a time. They are made once per step, as fresh memory for every layer
    would cost more than the copy into it."""

    groups: tuple[_Rows, ...]
    narrow: Tensor
    wide: Tensor

    def read(self, pool: KVPool, layer: int, tile: Tile) -> list[Tensor]:
        """Keys and values of `layer` in `tile`, fp32 [rows * heads, width, head_dim]; valid until the next read."""
        kept, size = pool.layout.layers[layer], len(tile.index)
        narrow = self.narrow[: size * kept.slot_bytes].view(-1, kept.slot_bytes)
        pool.gather(layer, tile.index, narrow)
        parts = narrow.split([vector.bytes for vector in kept.vectors], -1)
        found = [
            tile.scales.read(pool, layer, part, wide[:size])
            if vector.precision.by_channel and tile.scales
            else formats.decode(part, vector.precision, wide[:size])
            for part, vector, wide in zip(parts, kept.vectors, self.wide, strict=True)
        ]
        if kept.by_channel and tile.opened:
            tile.opened.put(pool, layer, found[0])
        return [part.unflatten(0, (-1, tile.stop - tile.first)) for part in found]


class ReferenceAttention:
    """The backend over `pool` for heads of pool.head_dim, one rule per layer, whose window is its layer group's."""

    name = "reference"

    def __init__(self, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        for layer, rule in enumerate(rules):
            if rule.window != pool.windows[pool.group_of[layer]]:
                raise ValueError(f"layer {layer} has a window of {rule.window}, its pages are kept for another")
        self._pool = pool
        self._rules = rules
        self._widest = max(layer.slot_bytes for layer in pool.layout.layers)
        self._decodes = pool.layout.precisions != {Precision.FP32}
        self._halves = {group: halves for group, halves in zip(pool.group_of, pool.open_groups, strict=True) if halves}

    def prepare(self, batch: Batch) -> _Step:
        """What one step reads and writes."""
        pool = self._pool
        groups = tuple(self._rows(batch, group) for group in range(1 + max(pool.group_of)))
        size = max(len(tile.index) for rows in groups for tile in rows.tiles)
        narrow = torch.empty(size * self._widest, dtype=torch.uint8, device=pool.device)
        return _Step(groups, narrow, torch.empty(2, size if self._decodes else 0, pool.head_dim, device=pool.device))

    def _rows(self, batch: Batch, group: int) -> _Rows:
        pool, halves = self._pool, self._halves.get(group, ())
        return _Rows(
            pool.rows(batch.slots(group)).view(-1),
            tiles.decodes(pool, batch.spans, len(batch.tokens), group, halves),
            tiles.chunks(pool, batch.spans, group, halves),
            OpenBlocks.of(pool, batch.spans, group, halves) if halves else None,
        )

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(step, _Step)
        pool = self._pool
        rows = step.groups[pool.group_of[layer]]
        each = heads.unflatten(-1, (-1, pool.head_dim))
        first = each.shape[1] - 2 * pool.heads
        if turns is not None:
            rotate(each[:, : first + pool.heads], turns)
        query = each[:, :first]
        self._store(layer, each[:, first:].unflatten(1, (2, -1)).unbind(1), rows)
        if len(rows.decodes) == 1 and rows.decodes[0].rows is None:
            return self._attend_decode(step, layer, query, rows.decodes[0]).to(query.dtype)
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
        for decode in rows.decodes:
            assert decode.rows is not None
            out[decode.rows] = self._attend_decode(step, layer, query.index_select(0, decode.rows), decode).to(
                out.dtype
            )
        for chunk in rows.chunks:
            part = slice(chunk.first, chunk.first + chunk.count)
            self._attend_chunk(step, layer, query[part], chunk, out[part])
        return out

    def _store(self, layer: int, parts: Sequence[Tensor], step: _Rows) -> None:
        """Keys and values [T, heads, head_dim] into their slots."""
        kept = self._pool.layout.layers[layer]
        if kept.by_channel:
            assert step.opened is not None
            step.opened.store(self._pool, layer, parts[0])
            values = formats.encode(parts[1], kept.vectors[1].precision)
            return self._pool.scatter(layer, step.write, values.flatten(0, 1), kept.vectors[0].bytes)
        fresh = [formats.encode(part, vector.precision) for part, vector in zip(parts, kept.vectors, strict=True)]
        self._pool.scatter(layer, step.write, torch.cat(fresh, -1).view(-1, kept.slot_bytes))

    def _attend_decode(self, step: _Step, layer: int, query: Tensor, decode: Decode) -> Tensor:
        """[B, q_heads, head_dim] → fp32 [B, q_heads * head_dim]."""
        rule = self._rules[layer]
        queries = self._grouped(query, rule).flatten(0, 1)
        if len(decode.tiles) == 1 and rule.sinks is None:
            keys, values = step.read(self._pool, layer, decode.tiles[0])
            scores = capped(torch.bmm(queries, keys.transpose(1, 2)), rule.softcap)
            hidden = decode.tiles[0].hidden
            if hidden is not None:
                scores.masked_fill_(hidden[:, 0], float("-inf"))
            return torch.bmm(scores.softmax(-1), values).view(len(query), -1)
        sinks = None if rule.sinks is None else rule.sinks.view(self._pool.heads, -1, 1).repeat(len(query), 1, 1)
        softmax = OnlineSoftmax(queries, rule.softcap, sinks)
        for tile in decode.tiles:
            keys, values = step.read(self._pool, layer, tile)
            softmax.take(keys, values, tile.hidden)
        return softmax.result().view(len(query), -1)

    def _attend_chunk(self, step: _Step, layer: int, query: Tensor, chunk: Chunk, out: Tensor) -> None:
        """[count, q_heads, head_dim] into `out` [count, q_heads * head_dim]."""
        rule, blocks = self._rules[layer], chunk.blocks
        softmaxes = [self._softmax(query[begin:end], rule) for begin, end in blocks]
        size = self._pool.block_size if self._pool.layout.layers[layer].by_channel else None
        for tile in (*chunk.tiles, *(chunk.open_tiles if size else ())):
            seeing = [i for i, block in enumerate(blocks) if chunk.sees(block, tile, rule.window, size)]
            if not seeing:
                continue
            keys, values = step.read(self._pool, layer, tile)
            for i in seeing:
                softmaxes[i].take(keys, values, chunk.hidden(blocks[i], tile, rule.window, size))
        for (begin, end), softmax in zip(blocks, softmaxes, strict=True):
            result = softmax.result().unflatten(1, (end - begin, -1)).transpose(0, 1)
            out[begin:end].view(result.shape).copy_(result)

    def _softmax(self, query: Tensor, rule: AttentionRule) -> OnlineSoftmax:
        """Of the tokens of one row, [q, q_heads, head_dim]: n are the KV heads, a token's query heads lie together."""
        queries = self._grouped(query, rule).transpose(0, 1).flatten(1, 2)
        sinks = None
        if rule.sinks is not None:
            sinks = rule.sinks.view(self._pool.heads, -1, 1).repeat(1, len(query), 1)
        return OnlineSoftmax(queries, rule.softcap, sinks)

    def _grouped(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """[T, q_heads, head_dim] → fp32 [T, KV heads, query heads of each, head_dim], scaled."""
        return (query.float() * rule.scale).unflatten(1, (self._pool.heads, -1))
