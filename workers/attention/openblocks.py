"""OpenBlocks: what a step does to keys by channel. They go to open blocks in 16 bits; a block whose last token comes is
sealed, and from then on tokens behind it read what was sealed. Tokens of the block itself never do.

So what a query reads depends on its position alone: not on how a prompt was cut into chunks, nor on whether the block
had been computed before. It knows a step's rows and tables, and the pool; nothing of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.layout import HALVES
from workers.attention import formats
from workers.batch import Span
from workers.kvpool import KVPool


@dataclass(frozen=True, slots=True)
class OpenKeys:
    """Where open keys lie: `blocks` and `offsets` in them, int64 [n]. `index` int64 [n * heads], names the keys of a
    gather, as rows of [rows * heads, width], that they stand in the place of."""

    blocks: Tensor
    offsets: Tensor
    index: Tensor

    def put(self, pool: KVPool, layer: int, keys: Tensor) -> None:
        """Those of `layer` over the gathered `keys`, fp32 [rows * heads * width, head_dim]."""
        fresh = pool.open_keys(layer)[self.blocks, :, self.offsets]
        keys.index_copy_(0, self.index, fresh.reshape(-1, pool.head_dim).float())


@dataclass(frozen=True, slots=True)
class ScaleRows:
    """Where the scales by channel of gathered keys lie: those of `blocks` and `heads`, int64 [m], each once; `which` of
    them is a key's, int64 [n]."""

    blocks: Tensor
    heads: Tensor
    which: Tensor

    @classmethod
    def of(cls, pool: KVPool, index: Tensor) -> ScaleRows:
        """For keys in the rows `index` of the pool's slots."""
        planes, which = torch.unique(index // pool.block_size, return_inverse=True)
        return cls(planes // pool.heads, planes % pool.heads, which)

    def read(self, pool: KVPool, layer: int, packed: Tensor, out: Tensor) -> Tensor:
        """The keys of `layer`, uint8 [n, head_dim / 2], as fp32 [n, head_dim] in `out`."""
        return formats.unseal(packed, pool.scales(layer)[self.blocks, self.heads], self.which, out)


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """A step over one layer group and the two of its open keys. `blocks`, `offsets`: where the step's tokens go, int64
    [T]; `full` int64 [n, 3]: of each block that it fills, the sealed one, and the halves of what was open."""

    blocks: Tensor
    offsets: Tensor
    full: Tensor

    @classmethod
    def of(cls, pool: KVPool, spans: Sequence[Span], group: int, halves: tuple[int, ...]) -> OpenBlocks:
        """For the rows `spans`, whose tables have the blocks."""
        size = pool.block_size
        blocks, offsets, full = [], [], []
        for span in spans:
            tables = [np.asarray(span.tables[half]) for half in halves]
            positions = np.arange(span.start, span.length)
            half, within = np.divmod(positions % size, size // HALVES)
            blocks.append(np.stack(tables)[half, positions // size])
            offsets.append(within)
            ends = range(span.start // size, span.length // size)
            full += [[span.tables[group][end], *(int(table[end]) for table in tables)] for end in ends]
        return cls(
            torch.from_numpy(np.concatenate(blocks)).to(pool.device),
            torch.from_numpy(np.concatenate(offsets)).to(pool.device),
            torch.tensor(full, dtype=torch.int64, device=pool.device).view(-1, 1 + HALVES),
        )

    def store(self, pool: KVPool, layer: int, keys: Tensor) -> None:
        """Keys [T, heads, head_dim] of the step, in whatever float dtype; and seal what is full."""
        opened = pool.open_keys(layer)
        opened[self.blocks, :, self.offsets] = keys.bfloat16()
        if not len(self.full):
            return
        sealed, *halves = self.full.unbind(1)
        packed, scales = formats.seal(torch.cat([opened[half] for half in halves], 2))
        width = packed.shape[-1]
        slots = pool.slots(layer).unflatten(1, (pool.heads, -1))
        slots[..., :width][sealed] = packed
        pool.scales(layer)[sealed] = scales


def places(tables: Tensor, rows: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of the open keys at `positions` of `rows`, int64 [n] each; `tables` int64 [2, rows, blocks]."""
    half, offset = positions % size // (size // HALVES), positions % (size // HALVES)
    return tables[half, rows, positions // size], offset
