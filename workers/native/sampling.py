"""NativeSampler: logits and draws to tokens in one call of the native library. The rules are workers.sampler's."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.native.library import Library
from workers.plan import Draw
from workers.sampler import MASK, kind_of

_DRAW = struct.Struct("=QqqdffiI")
"""struct Draw of sampling.cpp."""
_KINDS = {"greedy": 0, "plain": 1, "filtered": 2}


class NativeSampler:
    """Over `library`, for one thread at a time: it keeps the memory that it works in."""

    def __init__(self, library: Library) -> None:
        pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._sample = library.function("tg_sample", pointer, long, long, long, pointer, pointer, number, pointer)
        self._measure = library.function("tg_sample_scratch", long, ctypes.POINTER(long))
        self._size = long()
        self._sizes: dict[int, int] = {}
        self._rooms = library.threads
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._draws = bytearray()
        self._tokens = array("q")

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[int, ...]:
        """One token id per row of `logits` (fp32 [S, vocab] on a CPU, rows contiguous)."""
        rows, vocabulary = logits.shape
        if len(draws) != rows or logits.dtype != torch.float32 or logits.device.type != "cpu" or vocabulary < 1:
            raise ValueError(f"{len(draws)} draws for {logits.dtype} {list(logits.shape)} on {logits.device}")
        if logits.stride(1) != 1:
            raise ValueError(f"rows of logits must be contiguous, strides are {logits.stride()}")
        if not rows:
            return ()
        self._make_room(rows, vocabulary)
        for row, draw in enumerate(draws):
            kind = _KINDS[kind_of(draw, vocabulary)]
            limit = draw.top_k or vocabulary
            # C's floats end where these are cut: no result depends on more.
            heat = min(max(draw.temperature, 0.0), 3e38)
            numbers = (draw.seed & MASK, draw.position, limit, draw.top_p, heat, draw.min_p, kind, 0)
            _DRAW.pack_into(self._draws, row * _DRAW.size, *numbers)
        draws_at = ctypes.addressof((ctypes.c_char * len(self._draws)).from_buffer(self._draws))
        tokens_at = self._tokens.buffer_info()[0]
        place, scratch = logits.data_ptr(), self._scratch.data_ptr()
        self._sample(place, logits.stride(0), rows, vocabulary, draws_at, scratch, self._rooms, tokens_at)
        return tuple(self._tokens[:rows])

    def _make_room(self, rows: int, vocabulary: int) -> None:
        size = self._sizes.get(vocabulary)
        if size is None:
            self._measure(vocabulary, self._size)
            size = self._sizes[vocabulary] = self._size.value
        if len(self._scratch) < size * self._rooms:
            self._scratch = torch.empty(size * self._rooms, dtype=torch.uint8)
        if len(self._tokens) < rows:
            self._tokens = array("q", bytes(8 * rows))
            self._draws = bytearray(_DRAW.size * rows)
