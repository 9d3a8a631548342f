"""An errand's thread, and what OpenMP keeps for it, end with the errand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from workers.errand import run_errand


def test_what_it_returns_and_raises_comes_back() -> None:
    assert run_errand(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_errand(lambda: 1 // 0)


def test_its_openmp_team_ends_with_it() -> None:
    import torch

    if not torch.backends.openmp.is_available():
        pytest.skip("this torch computes without OpenMP")

    def compute() -> set[str]:
        torch.set_num_threads(3)
        torch.ones(2**20).add_(1)
        return threads()

    own = torch.get_num_threads()
    try:
        run_errand(compute)  # the first time torch starts threads of its own, which stay
        before = threads()
        of_the_errand = run_errand(compute) - before
        assert len(of_the_errand) == 3
        until = time.monotonic() + 10
        while of_the_errand & threads():  # they are told to end, and nobody waits for them
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        torch.set_num_threads(own)


def threads() -> set[str]:
    """Of this process, those that Python does not know included."""
    return {path.name for path in Path("/proc/self/task").iterdir()}
