"""Footprint: how many bytes a piece of work takes at its peak, and whether so many are to be had. It knows devices, not
models.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run `work` and return how far this process's memory (cuda: the device's) rose above where it stood before.

    On a CPU other threads of the process count as well, and memory that was free inside the process does not.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, int(torch.cuda.max_memory_allocated(device)) - before)
    if not _STATUS.exists():
        # Without /proc only the peak since the start of the process is known.
        work()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak if sys.platform == "darwin" else peak * 1024)
    # "5" resets the high-water mark; where that is not allowed the mark since the start is used, which is larger.
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def can_allocate(sizes: Sequence[int], device: torch.device) -> bool:
    """Whether buffers of `sizes` bytes can be had on `device` at the same time. They are given back at once: CUDA's
    allocator keeps the memory for the process, a CPU's promises nothing (the kernel may still end us when it is used).
    """
    try:
        taken = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    taken.clear()
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of torch has refused: CUDA's has its own exception, the CPU's only its own words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
