"""Arena: memory for packed weights, in huge pages where the system gives them. It knows no format."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_CHUNK = 64 * 2**20
_LINE = 64


class Arena:
    """Hands out pieces of large anonymous mappings; all of it goes when the last piece goes.

    Weights are read in full in every step: with pages of 4 KB the translation of addresses alone costs a part of the
    memory bandwidth. `exact`: each piece is an allocation of its own size, for a build that checks bounds.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], 64-byte aligned, holding anything."""
        if self._exact:
            return torch.empty(size, dtype=torch.uint8)
        padded = -(-size // _LINE) * _LINE
        if padded > self._rest.numel():
            self._rest = _mapped(max(padded, _CHUNK))
        piece, self._rest = self._rest[:size], self._rest[padded:]
        return piece


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
