"""How much memory a CPU rank may use and does use: the machine's or its cgroup's limit, this process's resident bytes;
and what the KV pool gets of it. Knows neither torch nor what fills the memory.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.layout import KVLayout
from workers.settings import GroupSettings

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class NoRoom(ValueError):
    """The KV pool would be empty; the message has the numbers and what to change."""


def machine_bytes(meminfo: Path = _MEMINFO, cgroups: tuple[Path, ...] = _CGROUPS) -> int:
    """Bytes of memory that this machine has, or that its cgroup allows where that is less."""
    limits = [_meminfo_total(meminfo)]
    for path in cgroups:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue  # not there, or "max"
    return min(limits)


def resident_bytes(statm: Path = _STATM) -> int:
    """Bytes of memory that this process occupies now."""
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pool_blocks(settings: GroupSettings, layout: KVLayout, *, total: int, used: int, activations: int) -> int:
    """How many blocks this rank's pool can have. Raises NoRoom when that is none.

    `kv_memory` where it is set; else what `memory_fraction` of the `total` bytes leaves beside the `used` ones and the
    `activations` of the largest step.
    """
    if settings.kv_memory is not None:
        blocks = layout.blocks_in(settings.kv_memory)
        if not blocks:
            raise NoRoom(
                f"kv_memory is {settings.kv_memory:,} bytes, and one block of {layout.block_size} tokens takes "
                f"{layout.block_bytes:,}; give at least that much"
            )
        return blocks
    budget = int(total * settings.memory_fraction)
    blocks = layout.blocks_in(max(0, budget - used - activations))
    if not blocks:
        raise NoRoom(
            f"{settings.memory_fraction:.1%} of {total:,} bytes are {budget:,}; weights and buffers take {used:,}, the "
            f"largest step {activations:,}, and one block of KV cache {layout.block_bytes:,}: raise the memory "
            "utilization, set kv_memory, or lower max_num_batched_tokens"
        )
    return blocks


def _meminfo_total(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no MemTotal in {meminfo}")
