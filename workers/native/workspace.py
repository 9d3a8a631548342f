"""Workspace: the buffers that kernels write to, one per slot, grown and never given back. It knows no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_VIEWS = 256
"""Remembered views at most; a step takes about ten and the next one mostly the same."""


class Workspace:
    """Memory that outlives a step: asking again for what an earlier step had costs a look into a dictionary. While
    `generation` stays the same, what was given once lies where it lay.

    Not for several threads at once: each rank has its own.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int, torch.dtype], Tensor] = {}

    def take(self, slot: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of `dtype`, contiguous and 64-byte aligned, on the CPU, holding anything.

        What `slot` gave before is overwritten, or lies in memory of its own from now on. Sizes are at least 1.
        """
        view = self._views.get((slot, rows, columns, dtype))
        return self._make(slot, rows, columns, dtype) if view is None else view

    @property
    def bytes(self) -> int:
        """What all slots hold together."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def _make(self, slot: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if rows < 1 or columns < 1:
            raise ValueError(f"slot {slot!r}: a buffer of {rows} x {columns} is empty")
        size = rows * columns * dtype.itemsize
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < size:
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}
            self._buffers.pop(slot, None)
            self.generation += 1
            buffer = self._buffers[slot] = torch.empty(size, dtype=torch.uint8)
        elif len(self._views) >= _VIEWS:
            self._views.clear()
        view = buffer[:size].view(dtype).view(rows, columns)
        self._views[slot, rows, columns, dtype] = view
        return view
