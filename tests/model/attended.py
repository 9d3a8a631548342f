"""A KV pool with an attention backend, and sequences that are fed through it in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision, Vector
from kvstore.table import GONE
from workers.attention.backend import AttentionRule
from workers.attention.reference import ReferenceAttention
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library
from workers.native.pairs import BLOCK_STEP
from workers.native.workspace import Workspace
from workers.rotation import Rotation

CPU = torch.device("cpu")
Step = Sequence[tuple[int, int]]
"""(sequence, tokens) of each row."""


class Still:
    """Turns by nothing."""

    def __init__(self, dim: int) -> None:
        self._pairs = dim // 2

    def at(self, positions: Tensor) -> Tensor:
        return torch.ones(len(positions), 1, self._pairs, dtype=torch.complex64)


class Attended:
    """The heads of a sequence at a position are always the same. `tables` are the sequences' blocks."""

    def __init__(
        self,
        library: Library | None,
        heads: int,
        ratio: int,
        dim: int,
        *,
        block_size: int | None = None,
        precision: Precision | tuple[Precision, Precision] = Precision.BF16,
        lengths: Sequence[int] = (700,),
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """`library` None: the reference, in fp32. `precision` of keys and values, or of either. Unused slots hold NaN
        for the native backend, and blocks before the window are gone. A block has 16 tokens, or as few as keys by
        channel allow, unless said otherwise."""
        kept = precision if isinstance(precision, tuple) else (precision, precision)
        block_size = block_size or (BLOCK_STEP if kept[0].by_channel else 16)
        needed = sum(-(-length // block_size) for length in lengths)
        layout = KVLayout(block_size, (LayerKV.pair(heads, dim, kept[0], kept[1].of_values, window),))
        groups = len(layout.groups)
        self.pool = KVPool(layout, groups * needed + 1, CPU)
        order = list(range(groups * needed + 1))
        random.Random(seed).shuffle(order)
        rule = AttentionRule(dim**-0.5, softcap, window, sinks)
        self._window = window
        self.tables = []
        self._opened: list[list[tuple[int, ...]]] = []
        for length in lengths:
            count = -(-length // block_size)
            parts = [tuple(order[part * count : (part + 1) * count]) for part in range(groups)]
            self.tables.append(parts[0])
            self._opened.append(parts[1:])
            order = order[groups * count :]
        self._dtype = torch.bfloat16 if library else torch.float32
        self.turns: Rotation | Still = Rotation(Rope(theta=100.0), dim, CPU)
        generator = torch.Generator().manual_seed(7)
        columns = (ratio + 2) * heads * dim
        self.heads = [torch.randn(length, columns, generator=generator).bfloat16() for length in lengths]
        self._seen = [0] * len(lengths)
        if library:
            self.pool.columns[0].fill_(255)
            self.backend: NativeAttention | ReferenceAttention = NativeAttention(
                Calls(library, Workspace()), self.pool, (rule,)
            )
        else:
            self.backend = ReferenceAttention(self.pool, (rule,))

    def batch(self, step: Step) -> Batch:
        spans, first, positions = [], 0, []
        for sequence, count in step:
            start = self._seen[sequence]
            spans.append(Span(first, count, start, self._tables(sequence, start, count)))
            positions.extend(range(start, start + count))
            first += count
        nothing = torch.empty(0, dtype=torch.int64)
        where = torch.tensor(positions)
        return Batch(torch.zeros_like(where), where, tuple(spans), nothing, (), self.pool.block_size)

    def _tables(self, sequence: int, start: int, count: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of a row, without those that none of its tokens sees."""
        size = self.pool.block_size
        unseen, stop = max(0, start + 1 - self._window) // size if self._window else 0, -(-(start + count) // size)
        sealed = (GONE,) * unseen + self.tables[sequence][unseen:stop]
        return sealed, *((GONE,) * (start // size) + half[start // size : stop] for half in self._opened[sequence])

    def run(self, step: Step) -> list[Tensor]:
        """The outputs of each row, fp32."""
        batch = self.batch(step)
        parts = [self.heads[sequence][self._seen[sequence] :][:count] for sequence, count in step]
        heads = torch.cat(parts).to(self._dtype)
        out = self.backend.attend(0, heads, self.turns.at(batch.positions), self.backend.prepare(batch))
        for sequence, count in step:
            self._seen[sequence] += count
        return [part.float().clone() for part in out.split([count for _, count in step])]

    def walk(self, sequence: int, chunks: Sequence[int]) -> Tensor:
        """All outputs of one sequence, fed alone in `chunks`."""
        return torch.cat([self.run([(sequence, count)])[0] for count in chunks])

    def store_nan(self, sequence: int, position: int) -> None:
        """Make NaN of what is stored of a token."""
        spans = (Span(0, 1, position, (self.tables[sequence], *self._opened[sequence])),)
        where = torch.tensor([position])
        batch = Batch(torch.zeros_like(where), where, spans, where[:0], (), self.pool.block_size)
        heads = torch.full_like(self.heads[sequence][:1], float("nan")).to(self._dtype)
        self.backend.attend(0, heads, None, self.backend.prepare(batch))


def stored(device: Attended) -> list[Tensor]:
    """Keys and values of the first sequence, taken out of the native kernel's tiles: what workers.attention.formats
    would have encoded, uint8 [tokens, heads, bytes of a vector] of either."""
    pool, kept = device.pool, device.pool.layout.layers[0]
    pages = pool.pages[0][list(device.tables[0])].unflatten(-1, (kept.heads, pool.block_size // 16, -1))
    sizes = [16 * vector.elements * vector.precision.bits // 8 for vector in kept.vectors]
    scales = [16 * vector.precision.scale_bytes for vector in kept.vectors]
    parts = pages.split([*sizes, *scales], -1)
    found = []
    for vector, words, scale, is_key in zip(kept.vectors, parts[:2], parts[2:], (True, False), strict=True):
        scale = scale.reshape(*scale.shape[:-1], 16, vector.precision.scale_bytes)
        content = torch.cat((_bytes_of(words, vector, is_key), scale), -1)  # [blocks, heads, tiles, 16, bytes]
        found.append(content.permute(0, 2, 3, 1, 4).flatten(0, 2)[: len(device.heads[0])])
    return found


def _bytes_of(words: Tensor, vector: Vector, is_key: bool) -> Tensor:
    """Tiles of words, uint8 [..., bytes], as the bytes of 16 slots, [..., 16, bytes of the elements]."""
    bits, dim = vector.precision.bits, vector.elements
    group = 32 // bits
    whole = words.contiguous().view(torch.int32)
    order = [index // 2 + index % 2 * (group // 2) for index in range(group)]
    elements = torch.stack([whole >> place * bits & (1 << bits) - 1 for place in order], -1)
    if is_key:  # [dim / group][16][group]
        elements = elements.unflatten(-2, (dim // group, 16)).transpose(-3, -2).flatten(-2)
    else:  # [16 / group][dim][group]
        elements = elements.unflatten(-2, (16 // group, dim)).transpose(-2, -1).flatten(-3, -2)
    if bits == 16:
        return elements.to(torch.int16).view(torch.uint8)
    if bits == 4:
        elements = elements[..., 0::2] | elements[..., 1::2] << 4
    return elements.to(torch.uint8)
