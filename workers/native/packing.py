"""PackedWeights: the matrices of a linear in the layout that the native kernels read. It knows no activations."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.native.arena import Arena
from workers.native.library import Library

PANEL = 16
"""Columns that the kernels treat together; packed weights are filled up to a multiple of it."""
GROUP = 32
"""Activations that share a scale where weights are int8."""
_MOST_PANELS = 3
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`tiles` of `width` panels (pack.cpp has the layout) with weights as bf16, or as int8 with a fp32 `scale` per
    packed column. `bias` fp32 in the order of packed columns, or None. `outputs` and `inputs` are those of one matrix,
    unpadded."""

    tiles: Tensor
    scale: Tensor | None
    bias: Tensor | None
    width: int
    outputs: int
    inputs: int

    @classmethod
    def of(
        cls,
        library: Library,
        arena: Arena,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        *,
        int8: bool = False,
    ) -> PackedWeights:
        """Matrices [out, in] of one shape, in fp32, bf16 or fp16, tile by tile in turn; a bias [out] in any float dtype
        for each or for none. Raises ValueError for what does not fit together."""
        outputs, inputs = _shape_of(weights)
        width = tile_width(outputs, library.threads)
        tiles = -(-outputs // (width * PANEL)) * len(weights)
        depth = -(-inputs // GROUP) * GROUP if int8 else -(-inputs // 2) * 4
        memory = arena.take(tiles * width * PANEL * depth)
        scale = torch.zeros(tiles * width * PANEL) if int8 else None
        scales = () if scale is None else (scale.data_ptr(),)
        kinds = (_POINTER, _INT, _SIZE, _SIZE, _SIZE, _INT, _SIZE, _SIZE, *(_POINTER,) * (1 + len(scales)))
        pack = library.function("tg_pack_bf16" if scale is None else "tg_pack_int8", *kinds)
        for index, weight in enumerate(weights):
            rows = weight if weight.dtype in _SOURCES and weight.stride(1) == 1 else weight.float().contiguous()
            where = rows.data_ptr(), _SOURCES[rows.dtype], rows.stride(0) * rows.itemsize
            pack(*where, outputs, inputs, width, index, len(weights), memory.data_ptr(), *scales)
        return cls(memory, scale, _tiled(biases, outputs, width), width, outputs, inputs)


def tile_width(outputs: int, threads: int) -> int:
    """Panels per tile for which the busiest of `threads` threads has least to do; the widest of those."""
    panels = -(-outputs // PANEL)

    def busiest(width: int) -> int:
        tiles = -(-panels // width)
        return -(-tiles // threads) * width

    return min(range(_MOST_PANELS, 0, -1), key=busiest)


def _shape_of(weights: Sequence[Tensor]) -> tuple[int, int]:
    shapes = {tuple(weight.shape) for weight in weights}
    if len(shapes) != 1 or any(weight.dim() != 2 or not weight.numel() for weight in weights):
        raise ValueError(f"weights must be of one shape [out, in] and not empty, got {sorted(shapes)}")
    outputs, inputs = shapes.pop()
    return outputs, inputs


def _tiled(vectors: Sequence[Tensor | None], outputs: int, width: int) -> Tensor | None:
    """fp32 vectors of one value per output, laid out as the packed columns are: a tile of each in turn."""
    present = [vector for vector in vectors if vector is not None]
    if not present:
        return None
    if len(present) != len(vectors) or any(vector.shape != (outputs,) for vector in present):
        raise ValueError(f"every bias must be [{outputs}], got {[list(vector.shape) for vector in present]}")
    columns = width * PANEL
    padded = torch.zeros(len(present), -(-outputs // columns) * columns)
    padded[:, :outputs] = torch.stack([vector.float() for vector in present])
    return padded.view(len(present), -1, columns).transpose(0, 1).contiguous()
