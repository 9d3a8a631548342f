"""KVPool: the memory behind a rank's blocks. It knows pages and slots, not who holds them.

One uint8 tensor [blocks, page_bytes] per layer, zero-filled. Copying and zeroing take a page as bytes: what lies where
in it is the attention backend's affair. The views here are the reference backend's: [2, heads, block_size] vectors, all
keys of a head, then of the next, then the values, so that a (block, keys or values, head) is one contiguous tile and a
slot of a head one contiguous vector. A vector is head_dim elements; in int8 its fp32 scale follows, as four more.
`rows` gives vectors' places in `vectors`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from workers.models.spec import Unsupported

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.INT8: torch.int8,
}


class KVPool:
    """`blocks` blocks of `layout` on `device`. Raises Unsupported for a precision or a layout without kernels.

    `dtype` is that of the elements, `width` how many a vector takes, its scale included.
    """

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        first = layout.layers[0]
        if first.precision not in _DTYPES:
            known = ", ".join(precision.label for precision in _DTYPES)
            raise Unsupported(f"kv_precision {first.precision.label} is not supported; known: {known}")
        if any(layer != first for layer in layout.layers) or first.vectors != 2 or first.window is not None:
            raise Unsupported("KV layouts that mix layers, windows or joint latents are not supported")
        if first.precision.scale_bytes and first.head_dim % 4:
            raise Unsupported(f"kv_precision {first.precision.label} needs a head_dim that is a multiple of 4")
        self.blocks = blocks
        self.block_size = layout.block_size
        self.heads = first.heads
        self.head_dim = first.head_dim
        self.dtype = _DTYPES[first.precision]
        self.width = first.precision.vector_bytes(first.head_dim) // self.dtype.itemsize
        self.device = device
        self.pages = [_zeros(blocks, layout.page_bytes(index), device) for index in range(len(layout.layers))]
        self._typed = [
            page.view(self.dtype).view(blocks, 2, self.heads, self.block_size, self.width) for page in self.pages
        ]
        self._vectors = [typed.view(-1, self.width) for typed in self._typed]

    def keys(self, layer: int) -> Tensor:
        """Keys of `layer`, a view [blocks, block_size, heads, width]."""
        return self._typed[layer][:, 0].transpose(1, 2)

    def values(self, layer: int) -> Tensor:
        """Values of `layer`, a view [blocks, block_size, heads, width]."""
        return self._typed[layer][:, 1].transpose(1, 2)

    def vectors(self, layer: int) -> Tensor:
        """Every key and value vector of `layer`, a view [blocks * 2 * heads * block_size, width]."""
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


def _zeros(blocks: int, page_bytes: int, device: torch.device) -> Tensor:
    """uint8 [blocks, page_bytes], zeros. On a CPU in huge pages where the system has them: an attention kernel jumps
    from block to block, and each jump would miss the table of small pages. The memory is taken as it is written."""
    size = blocks * page_bytes
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(blocks, page_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, page_bytes)
