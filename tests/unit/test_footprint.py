"""peak_bytes: what a piece of work took at its peak, freed or not."""

from __future__ import annotations

import torch

from workers.footprint import peak_bytes

MIB = 1 << 20


def test_memory_that_is_free_again_at_the_end_counts() -> None:
    peak = peak_bytes(lambda: torch.ones(96 * MIB // 4).sum(), torch.device("cpu"))
    assert 80 * MIB < peak < 300 * MIB


def test_work_that_takes_nothing_counts_for_little() -> None:
    assert peak_bytes(lambda: None, torch.device("cpu")) < 32 * MIB
