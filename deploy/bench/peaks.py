"""Measures what this machine can do at most: multiply-adds per second by format, bytes read from memory per second.

With the native library's own loops, or, where there is none, with torch's matrix product and sum, which get less out of
it. Loads torch. Knows no model.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from workers.native.library import Library

KINDS = ("fp32", "bf16", "int8")
"""In the order in which tg_peak_multiply_add numbers them."""
READ_BYTES = 256 * 2**20
"""Eight times the cache of the largest processors we met, so that memory is what is read."""
_BURSTS, _PASSES = 8, 4
_ROUNDS = 4_000_000
"""Of twelve independent multiply-adds: some 15 ms, against which threads that wake up late do not count."""
_SIDE = 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """Operations per second by format (those that this processor has instructions for), bytes read per second."""

    operations: dict[str, float]
    read: float


class PeakMeter:
    """Measures when it is called, with the threads that torch has. The best of a few short bursts counts: whoever else
    runs here can only take away."""

    def __init__(self, library: Library | None) -> None:
        self._buffer = torch.ones(READ_BYTES // 4)  # written, so that its pages are there
        self._library = library

    @property
    def how(self) -> str:
        """What it measures with."""
        return f"native {self._library.variant}" if self._library else "torch"

    def __call__(self) -> Measured:
        """Takes about a second."""
        return self._native(self._library) if self._library else self._torch()

    def _native(self, library: Library) -> Measured:
        add = library.function("tg_peak_multiply_add", ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
        read = library.function("tg_peak_read", ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64))
        done, total = ctypes.c_int64(), ctypes.c_uint64()
        operations = {}
        for number, kind in enumerate(KINDS):

            def burst(number: int = number) -> float:
                if add(number, _ROUNDS, ctypes.byref(done)):
                    raise LookupError(number)
                return float(done.value)

            with suppress(LookupError):  # this build has no instruction for it
                operations[kind] = _best_rate(burst)
        start, words = self._buffer.data_ptr(), self._buffer.nbytes // 8
        seconds = [_timed(lambda: read(start, words, ctypes.byref(total))) for _ in range(_PASSES)]
        return Measured(operations, 8.0 * words / min(seconds))

    def _torch(self) -> Measured:
        operations = {}
        for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            left, right = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))

            def burst(left: torch.Tensor = left, right: torch.Tensor = right) -> float:
                torch.mm(left, right)
                return 2.0 * _SIDE**3

            operations[kind] = _best_rate(burst)
        seconds = [_timed(self._buffer.sum) for _ in range(_PASSES)]
        return Measured(operations, self._buffer.nbytes / min(seconds))


def _best_rate(burst: Callable[[], float]) -> float:
    """Operations per second of the best of several bursts; `burst` gives how many operations it did."""
    rates = []
    for _ in range(_BURSTS):
        began = time.perf_counter()
        operations = burst()
        rates.append(operations / (time.perf_counter() - began))
    return max(rates)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
