"""What is due when: a heap of (time, item). Knows no clock; what has become void in between its user skips."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Timers(Generic[T]):
    """Items come out in the order of their times, equal ones in the order they came in."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, item: T) -> None:
        """`item` is due at `at`."""
        self._added += 1
        heapq.heappush(self._heap, (at, self._added, item))

    def due(self, now: float) -> Iterator[tuple[float, T]]:
        """Take out what is due at `now`, with its time; more may be added meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            at, _, item = heapq.heappop(self._heap)
            yield at, item

    def trim(self, live: int, keep: Callable[[float, T], bool]) -> None:
        """Drop what `keep` has no use for, once that may be more than half; about `live` items are of use."""
        if len(self._heap) > 2 * live + 64:
            self._heap = [entry for entry in self._heap if keep(entry[0], entry[2])]
            heapq.heapify(self._heap)
