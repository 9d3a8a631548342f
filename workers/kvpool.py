"""KVPool: the memory behind a rank's blocks. It knows pages and slots, not who holds them.

One uint8 tensor [blocks, page_bytes] per layer, zero-filled. A page is laid out [2, heads, block_size, head_dim]: all
keys of a head, then of the next, then the values, so that a (block, keys or values, head) is one contiguous tile and a
slot of a head one contiguous vector. `row` gives a vector's place in `vectors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from workers.models.spec import Unsupported

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


class KVPool:
    """`blocks` blocks of `layout` on `device`. Raises Unsupported for a precision or a layout without kernels."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        first = layout.layers[0]
        if first.precision not in _DTYPES:
            known = ", ".join(precision.label for precision in _DTYPES)
            raise Unsupported(f"kv_precision {first.precision.label} is not supported; known: {known}")
        if any(layer != first for layer in layout.layers) or first.vectors != 2 or first.window is not None:
            raise Unsupported("KV layouts that mix layers, windows or joint latents are not supported")
        self.blocks = blocks
        self.block_size = layout.block_size
        self.heads = first.heads
        self.head_dim = first.head_dim
        self.dtype = _DTYPES[first.precision]
        self.device = device
        self.pages = [
            torch.zeros(blocks, layout.page_bytes(index), dtype=torch.uint8, device=device)
            for index in range(len(layout.layers))
        ]
        self._typed = [
            page.view(self.dtype).view(blocks, 2, self.heads, self.block_size, self.head_dim) for page in self.pages
        ]
        self._vectors = [typed.view(-1, self.head_dim) for typed in self._typed]

    def keys(self, layer: int) -> Tensor:
        """Keys of `layer`, a view [blocks, block_size, heads, head_dim]."""
        return self._typed[layer][:, 0].transpose(1, 2)

    def values(self, layer: int) -> Tensor:
        """Values of `layer`, a view [blocks, block_size, heads, head_dim]."""
        return self._typed[layer][:, 1].transpose(1, 2)

    def vectors(self, layer: int) -> Tensor:
        """Every key and value vector of `layer`, a view [blocks * 2 * heads * block_size, head_dim]."""
        return self._vectors[layer]

    def rows(self, slots: Tensor) -> Tensor:
        """Rows of `vectors` for `slots` (block * block_size + offset, int64 [...]): [..., 2 * heads], keys first."""
        block, offset = slots // self.block_size, slots % self.block_size
        planes = torch.arange(2 * self.heads, device=self.device)
        return ((block * (2 * self.heads))[..., None] + planes) * self.block_size + offset[..., None]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block for each (source, destination); every source is read before anything is written."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self.device).unbind(1)
        for page in self.pages:
            page.index_copy_(0, destination, page.index_select(0, source))

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with zeros."""
        if not blocks:
            return
        index = torch.tensor(blocks, device=self.device)
        for page in self.pages:
            page.index_fill_(0, index, 0)
