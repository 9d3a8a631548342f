"""KVPool: the memory behind a rank's blocks. It knows pages and slots, not who holds them.

One uint8 tensor [blocks, page_bytes] per layer, zero-filled. Copying and zeroing take a page as bytes: what lies where
in it is the attention backend's affair. The views here are the reference backend's: a page is [heads, block_size]
slots, a slot the vectors of one head and token behind each other, scales included. `rows` gives their places in
`slots`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from workers.attention.formats import fault
from workers.models.spec import Unsupported


class KVPool:
    """`blocks` blocks of `layout` on `device`. Raises Unsupported for a layout without kernels. `heads` and `head_dim`
    are those of every layer."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        first = layout.layers[0]
        dims = {vector.elements for layer in layout.layers for vector in layer.vectors}
        if len(dims) > 1 or any(len(layer.vectors) != 2 or layer.window is not None for layer in layout.layers):
            raise Unsupported("KV layouts with windows, joint latents or heads of several sizes are not supported")
        if any(layer.heads != first.heads for layer in layout.layers):
            raise Unsupported("KV layouts with layers of different numbers of heads are not supported")
        for layer in layout.layers:
            if why := fault(layer.vectors):
                raise Unsupported(f"kv_precision: {why}")
        self.layout = layout
        self.blocks = blocks
        self.block_size = layout.block_size
        self.heads = first.heads
        (self.head_dim,) = dims
        self.device = device
        self.pages = [_zeros(blocks, layout.page_bytes(index), device) for index in range(len(layout.layers))]
        self._slots = [page.view(-1, layer.slot_bytes) for page, layer in zip(self.pages, layout.layers, strict=True)]

    def slots(self, layer: int) -> Tensor:
        """Every slot of `layer`, a uint8 view [blocks * heads * block_size, slot_bytes]."""
        return self._slots[layer]

    def rows(self, slots: Tensor) -> Tensor:
        """Rows of `slots` for tokens' slots (block * block_size + offset, int64 [...]): [..., heads]."""
        block, offset = slots // self.block_size, slots % self.block_size
        planes = torch.arange(self.heads, device=self.device)
        return ((block * self.heads)[..., None] + planes) * self.block_size + offset[..., None]

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


def _zeros(blocks: int, page_bytes: int, device: torch.device) -> Tensor:
    """uint8 [blocks, page_bytes], zeros. On a CPU in huge pages where the system has them: an attention kernel jumps
    from block to block, and each jump would miss the table of small pages. The memory is taken as it is written."""
    size = blocks * page_bytes
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(blocks, page_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, page_bytes)
