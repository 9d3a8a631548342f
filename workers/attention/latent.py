"""LatentAttention: MLA (DeepSeek-V2, arXiv 2405.04434 section 2.1) in plain torch on any device, over a pool that keeps
one latent and one rotated key per token for all heads.

There are two ways to the same numbers. Absorbed: queries go through the matrix of keys, are multiplied with latents,
and what they gather goes through the matrix of values; so it is for one-token rows and for short chunks. Expanded: a
tile's latents become keys and values of every head; so it is for chunks whose many queries make this the cheaper one.
Both go over the context tile by tile: what a chunk takes beside the pool does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.attention import formats, tiles
from workers.attention.backend import AttentionRule, Expansion
from workers.attention.softmax import OnlineSoftmax
from workers.attention.tiles import Chunk, Decode, Tile
from workers.batch import Batch
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.rotation import rotate


@dataclass(frozen=True, slots=True)
class _Step:
    """`write`: where the step's tokens go, int64 [T]. `narrow` (slots as they are stored, uint8) and `wide` (fp32 [most
    slots of a tile, latent + rotated]) take one gather at a time."""

    write: Tensor
    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]
    narrow: Tensor
    wide: Tensor


class LatentAttention:
    """The backend over `pool`, whose layers all keep latents; one rule per layer, each with an expansion."""

    name = "latent"

    def __init__(self, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        if any((rule.softcap, rule.window, rule.sinks) != (None,) * 3 for rule in rules):
            raise Unsupported("attention over MLA's latents knows neither windows nor soft-capping nor sinks")
        if not pool.joint:
            raise ValueError("latent attention wants a pool of latents")
        self._pool = pool
        self._parts = [_Part(rule) for rule in rules]
        self._rank, self._rope = (vector.elements for vector in pool.layout.layers[0].vectors)
        self._widest = max(layer.slot_bytes for layer in pool.layout.layers)

    def prepare(self, batch: Batch) -> _Step:
        """What one step reads and writes."""
        pool = self._pool
        decodes = tiles.decodes(pool, batch.spans, len(batch.tokens), 0)
        chunks = tiles.chunks(pool, batch.spans, 0)
        parts: tuple[Decode | Chunk, ...] = (*decodes, *chunks)
        most = max(len(tile.index) for part in parts for tile in part.tiles)
        narrow = torch.empty(most * self._widest, dtype=torch.uint8, device=pool.device)
        wide = torch.empty(most, self._rank + self._rope, device=pool.device)
        return _Step(batch.slots(0), decodes, chunks, narrow, wide)

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend."""
        assert isinstance(step, _Step)
        part, kept = self._parts[layer], self._rank + self._rope
        queries, latents = heads[:, :-kept].unflatten(-1, (part.heads, -1)), heads[:, -kept:]
        if turns is not None:
            rotate(queries[..., -self._rope :], turns)
            rotate(latents[:, None, self._rank :], turns)
        self._store(layer, latents, step)
        out = heads.new_empty(len(heads), part.heads, part.shape.values)
        for decode in step.decodes:
            rows = slice(None) if decode.rows is None else decode.rows
            out[rows] = self._attend_decode(layer, queries[rows], step, decode)
        for chunk in step.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            attend = self._attend_expanded if part.shape.expands(chunk.count) else self._attend_absorbed
            attend(layer, queries[span], step, chunk, out[span])
        return out.flatten(1)

    def _store(self, layer: int, latents: Tensor, step: _Step) -> None:
        """Latents and rotated keys [T, rank + rope] into their slots."""
        parts = latents.split((self._rank, self._rope), -1)
        vectors = self._pool.layout.layers[layer].vectors
        fresh = [formats.encode(part, vector.precision) for part, vector in zip(parts, vectors, strict=True)]
        self._pool.scatter(layer, step.write, torch.cat(fresh, -1))

    def _read(self, layer: int, tile: Tile, step: _Step) -> Tensor:
        """Latents and rotated keys in `tile`, fp32 [rows, width, rank + rope]; valid until the next read."""
        kept, size = self._pool.layout.layers[layer], len(tile.index)
        narrow = step.narrow[: size * kept.slot_bytes].view(-1, kept.slot_bytes)
        self._pool.gather(layer, tile.index, narrow)
        wide = step.wide[:size]
        parts = narrow.split([vector.bytes for vector in kept.vectors], -1)
        places = wide.split((self._rank, self._rope), -1)
        for part, vector, place in zip(parts, kept.vectors, places, strict=True):
            decoded = formats.decode(part, vector.precision, place)
            if decoded is not place:  # fp32, where it lay
                place.copy_(decoded)
        return wide.unflatten(0, (-1, tile.stop - tile.first))

    def _attend_decode(self, layer: int, queries: Tensor, step: _Step, decode: Decode) -> Tensor:
        """[B, heads, nope + rope] → [B, heads, elements of a value]."""
        part = self._parts[layer]
        softmax = OnlineSoftmax(part.absorbed(queries), None, None, self._rank)
        for tile in decode.tiles:
            both = self._read(layer, tile, step)
            softmax.take(both, both[..., : self._rank], tile.hidden)
        return part.released(softmax.result(), queries.dtype)

    def _attend_absorbed(self, layer: int, queries: Tensor, step: _Step, chunk: Chunk, out: Tensor) -> None:
        """[count, heads, nope + rope] into `out` [count, heads, elements of a value]. All heads of all tokens of a
        block look at the same latents, a token's heads next to each other."""
        part = self._parts[layer]
        absorbed = part.absorbed(queries)
        sums = [
            OnlineSoftmax(absorbed[begin:end].reshape(1, -1, absorbed.shape[2]), None, None, self._rank)
            for begin, end in chunk.blocks
        ]
        for tile in chunk.tiles:
            both = self._read(layer, tile, step)
            for block, softmax in zip(chunk.blocks, sums, strict=True):
                if chunk.sees(block, tile, None):
                    softmax.take(both, both[..., : self._rank], chunk.hidden(block, tile, None))
        for (begin, end), softmax in zip(chunk.blocks, sums, strict=True):
            gathered = softmax.result().view(end - begin, part.heads, -1)
            out[begin:end] = part.released(gathered, queries.dtype)

    def _attend_expanded(self, layer: int, queries: Tensor, step: _Step, chunk: Chunk, out: Tensor) -> None:
        """[count, heads, nope + rope] into `out` [count, heads, elements of a value]."""
        part = self._parts[layer]
        scaled = part.scaled(queries).transpose(0, 1)
        sums = [OnlineSoftmax(scaled[:, begin:end], None, None, part.shape.values) for begin, end in chunk.blocks]
        for tile in chunk.tiles:
            keys, values = part.expanded(self._read(layer, tile, step)[0], queries.dtype)
            for block, softmax in zip(chunk.blocks, sums, strict=True):
                if chunk.sees(block, tile, None):
                    softmax.take(keys, values, chunk.hidden(block, tile, None))
        for (begin, end), softmax in zip(chunk.blocks, sums, strict=True):
            out[begin:end] = softmax.result().transpose(0, 1)


class _Part:
    """What one layer's rule makes of queries and latents."""

    def __init__(self, rule: AttentionRule) -> None:
        if rule.expansion is None:
            raise ValueError("latent attention wants an expansion in every rule")
        self._expansion: Expansion = rule.expansion
        self._scale = rule.scale
        self.heads = len(rule.expansion.keys)
        self.shape = rule.expansion.shape
        self._nope, self._rank = self.shape.nope, self.shape.rank

    def scaled(self, queries: Tensor) -> Tensor:
        """In fp32, times the scale."""
        return queries.float() * self._scale

    def absorbed(self, queries: Tensor) -> Tensor:
        """Queries [n, heads, nope + rope] as latents see them: fp32 [n, heads, rank + rope], scaled."""
        through = torch.bmm(queries[..., : self._nope].transpose(0, 1), self._expansion.keys).transpose(0, 1)
        return self.scaled(torch.cat((through, queries[..., self._nope :]), -1))

    def released(self, gathered: Tensor, dtype: torch.dtype) -> Tensor:
        """Latents gathered by queries, fp32 [n, heads, rank], as values: [n, heads, elements of a value] in `dtype`."""
        values = self._expansion.values.transpose(1, 2)
        return torch.bmm(gathered.to(dtype).transpose(0, 1), values).transpose(0, 1)

    def expanded(self, both: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents and rotated keys, fp32 [w, rank + rope], as keys and values of every head, fp32 [heads, w, …]."""
        latents, rotated = both[:, : self._rank].to(dtype), both[:, self._rank :]
        keys, values = (
            linear(latents, matrices.flatten(0, 1)).unflatten(-1, matrices.shape[:2]).transpose(0, 1).float()
            for matrices in (self._expansion.keys, self._expansion.values)
        )
        return torch.cat((keys, rotated.expand(self.heads, -1, -1)), -1), values
