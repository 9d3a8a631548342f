"""Errand: work that a thread does and ends. It does not know the work.

OpenMP keeps a team for every thread that has computed. With more teams' threads than cores none of them spins any
more, and every parallel region of every team waits for a wake-up by the kernel: a decode step of a small model takes
1.4 times as long. A team ends with its thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_errand(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, on a thread that is gone afterwards."""
    with ThreadPoolExecutor(1, thread_name_prefix="errand") as thread:
        return thread.submit(work).result()
