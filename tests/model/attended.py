"""A KV pool with an attention backend, and sequences that are fed through it in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision
from workers.attention.backend import AttentionRule
from workers.attention.reference import ReferenceAttention
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library
from workers.native.workspace import Workspace
from workers.rotation import Rotation

CPU = torch.device("cpu")
Step = Sequence[tuple[int, int]]
"""(sequence, tokens) of each row."""


class Attended:
    """The heads of a sequence at a position are always the same. `tables` are the sequences' blocks."""

    def __init__(
        self,
        library: Library | None,
        heads: int,
        ratio: int,
        dim: int,
        *,
        block_size: int = 16,
        precision: Precision = Precision.BF16,
        lengths: Sequence[int] = (700,),
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """`library` None: the reference, in fp32. Unused slots hold NaN for the native backend."""
        needed = sum(-(-length // block_size) for length in lengths)
        self.pool = KVPool(KVLayout(block_size, (LayerKV.pair(heads, dim, precision),)), needed + 1, CPU)
        order = list(range(needed + 1))
        random.Random(seed).shuffle(order)
        rule = AttentionRule(dim**-0.5, softcap, window)
        self.tables = []
        for length in lengths:
            count = -(-length // block_size)
            self.tables.append(tuple(order[:count]))
            order = order[count:]
        self._dtype = torch.bfloat16 if library else torch.float32
        self.turns = Rotation(Rope(theta=100.0), dim, CPU)
        generator = torch.Generator().manual_seed(7)
        columns = (ratio + 2) * heads * dim
        self.heads = [torch.randn(length, columns, generator=generator).bfloat16() for length in lengths]
        self._seen = [0] * len(lengths)
        if library:
            self.pool.pages[0].fill_(255)
            self.backend: NativeAttention | ReferenceAttention = NativeAttention(
                Calls(library, Workspace()), self.pool, (rule,)
            )
        else:
            self.backend = ReferenceAttention(self.pool, (rule,))

    def batch(self, step: Step) -> Batch:
        spans, first, positions = [], 0, []
        for sequence, count in step:
            start = self._seen[sequence]
            table = self.tables[sequence][: -(-(start + count) // self.pool.block_size)]
            spans.append(Span(first, count, start, (table,)))
            positions.extend(range(start, start + count))
            first += count
        nothing = torch.empty(0, dtype=torch.int64)
        where = torch.tensor(positions)
        return Batch(torch.zeros_like(where), where, tuple(spans), nothing, (), self.pool.block_size)

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
        spans = (Span(0, 1, position, (self.tables[sequence],)),)
        where = torch.tensor([position])
        batch = Batch(torch.zeros_like(where), where, spans, where[:0], (), self.pool.block_size)
        heads = torch.full_like(self.heads[sequence][:1], float("nan")).to(self._dtype)
        self.backend.attend(0, heads, None, self.backend.prepare(batch))
