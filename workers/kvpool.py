"""KVPool: the memory behind a rank's blocks. It knows pages and slots, not who holds them.

One uint8 tensor [blocks, bytes] per column of the layout, zero-filled: the layers of a group have one each, and share
it with those of other groups, as a block is one group's at a time. Copying and zeroing take a block as bytes: what lies
where in it is the attention backend's affair. The views here are the reference backend's: a page is [heads, block_size]
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
    are those of every layer; `joint`: all of them keep MLA's latents, and `head_dim` is a latent's. `group_of[layer]`
    is the layer's group, `open_groups[layer]` those of its open keys, `windows` those of the groups; `pages[layer]` the
    layer's pages, uint8 [blocks, bytes of a page], which may lie apart; `open_pages[layer]` what blocks with open keys
    hold in the same place."""

    def __init__(self, layout: KVLayout, blocks: int, device: torch.device) -> None:
        first = layout.layers[0]
        dims = {tuple(vector.elements for vector in layer.vectors) for layer in layout.layers}
        if len(dims) > 1 or any(len(sizes) != 2 for sizes in dims) or len({layer.joint for layer in layout.layers}) > 1:
            raise Unsupported("KV layouts with heads of several sizes, or with MLA in some layers, are not supported")
        self.joint = first.joint
        self.head_dim, second = dims.pop()
        if second != self.head_dim and not self.joint:
            raise Unsupported(f"keys of {self.head_dim} elements beside values of {second} are not supported")
        if any(layer.heads != first.heads for layer in layout.layers):
            raise Unsupported("KV layouts with layers of different numbers of heads are not supported")
        for layer in layout.layers:
            if why := fault(layer.vectors):
                raise Unsupported(f"kv_precision: {why}")
        self.layout = layout
        self.blocks = blocks
        self.block_size = layout.block_size
        self.heads = first.heads
        self.device = device
        self.group_of = tuple(group for group, _ in layout.places)
        self.open_groups = layout.open_groups
        self.windows = tuple(group.window for group in layout.groups)
        self.columns = [_zeros(blocks, column, device) for column in layout.columns]
        self.pages = [
            self.columns[column][:, : layout.page_bytes(layer)] for layer, (_, column) in enumerate(layout.places)
        ]
        self.open_pages = [
            self.columns[column][:, : layout.open_bytes(layer)] for layer, (_, column) in enumerate(layout.places)
        ]

    def slots(self, layer: int) -> Tensor:
        """Every slot of `layer`, a uint8 view [blocks, heads * block_size, slot_bytes]."""
        slot_bytes = self.layout.layers[layer].slot_bytes
        taken = self.heads * self.block_size * slot_bytes
        return self.pages[layer][:, :taken].unflatten(1, (-1, slot_bytes))

    def scales(self, layer: int) -> Tensor:
        """Steps and lowest values by channel of `layer`, a bf16 view [blocks, heads, 2, head_dim]."""
        taken = self.heads * self.block_size * self.layout.layers[layer].slot_bytes
        return self.pages[layer][:, taken:].view(torch.bfloat16).unflatten(1, (self.heads, 2, self.head_dim))

    def open_keys(self, layer: int) -> Tensor:
        """What blocks of the groups of open keys hold for `layer`, a bf16 view [blocks, heads, block_size / 2,
        head_dim]."""
        return self.open_pages[layer].view(torch.bfloat16).unflatten(1, (self.heads, -1, self.head_dim))

    def gather(self, layer: int, rows: Tensor, out: Tensor) -> Tensor:
        """The slots of `layer` at `rows` (int64 [n]) into `out`, uint8 [n, slot_bytes]."""
        slots = self.slots(layer)
        if slots.is_contiguous():
            return torch.index_select(slots.flatten(0, 1), 0, rows, out=out)
        return out.copy_(slots[rows // slots.shape[1], rows % slots.shape[1]])

    def scatter(self, layer: int, rows: Tensor, fresh: Tensor, first: int = 0) -> None:
        """Write `fresh`, uint8 [n, bytes], into the slots of `layer` at `rows`, from byte `first` of a slot to its
        end."""
        slots = self.slots(layer)
        if slots.is_contiguous() and not first:
            slots.flatten(0, 1).index_copy_(0, rows, fresh)
        else:
            slots[..., first:][rows // slots.shape[1], rows % slots.shape[1]] = fresh

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
        for column in self.columns:
            column.index_copy_(0, destination, column.index_select(0, source))

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with zeros."""
        if not blocks:
            return
        index = torch.tensor(blocks, device=self.device)
        for column in self.columns:
            column.index_fill_(0, index, 0)


def _zeros(blocks: int, page_bytes: int, device: torch.device) -> Tensor:
    """uint8 [blocks, page_bytes], zeros. On a CPU in huge pages where the system has them: an attention kernel jumps
    from block to block, and each jump would miss the table of small pages. The memory is taken as it is written."""
    size = blocks * page_bytes
    if device.type != "cpu" or not size or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(blocks, page_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, page_bytes)
