"""How many blocks a rank's pool gets, and the memory that this is a share of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.layout import KVLayout, LayerKV, Precision
from workers.memory import NoRoom, machine_bytes, pool_blocks, resident_bytes
from workers.settings import GroupSettings

LAYOUT = KVLayout(16, (LayerKV.pair(2, 64, Precision.BF16),) * 3)  # 24,576 bytes per block
SETTINGS = GroupSettings("/models/x", ("x",), block_size=16, memory_fraction=0.5)


def test_kv_memory_goes_before_everything_else() -> None:
    settings = replace(SETTINGS, kv_memory=10 * LAYOUT.block_bytes + 1)
    assert pool_blocks(settings, LAYOUT, total=1, used=2**40, activations=2**40) == 10


def test_the_pool_gets_what_weights_and_the_largest_step_leave_of_the_share() -> None:
    total = 200 * LAYOUT.block_bytes
    used, activations = 30 * LAYOUT.block_bytes, 20 * LAYOUT.block_bytes
    assert pool_blocks(SETTINGS, LAYOUT, total=total, used=used, activations=activations) == 50


def test_an_empty_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(NoRoom, match=r"50\.0% of 1,000 bytes are 500; .* take 400, .* 200, .* 24,576"):
        pool_blocks(SETTINGS, LAYOUT, total=1000, used=400, activations=200)
    with pytest.raises(NoRoom, match=r"kv_memory is 24,575 bytes, and one block of 16 tokens takes 24,576"):
        pool_blocks(replace(SETTINGS, kv_memory=24_575), LAYOUT, total=1, used=0, activations=0)


def test_a_cgroup_limit_counts_where_it_is_below_the_machine(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemFree: 1 kB\nMemTotal:  2048 kB\n")
    assert machine_bytes(meminfo, (tmp_path / "absent",)) == 2 * 2**20
    limit.write_text("max\n")
    assert machine_bytes(meminfo, (limit,)) == 2 * 2**20
    limit.write_text("1048576\n")
    assert machine_bytes(meminfo, (limit,)) == 2**20


def test_this_process_takes_memory() -> None:
    assert 2**20 < resident_bytes() < machine_bytes()
