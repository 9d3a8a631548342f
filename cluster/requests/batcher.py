"""Collects what comes within one tick of the event loop and sends it as one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from cluster.requests.crew import Crew

T = TypeVar("T")


class Batcher(Generic[T]):
    """`send` gets at most `limit` items at a time, and deals with whatever goes wrong. Batches may overlap."""

    def __init__(
        self, crew: Crew, send: Callable[[tuple[T, ...]], Coroutine[Any, Any, None]], limit: int = 512
    ) -> None:
        self._crew = crew
        self._send = send
        self._limit = limit
        self._items: list[T] = []

    def add(self, item: T) -> None:
        """Send `item` with the others of this tick."""
        self._items.append(item)
        if len(self._items) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send now what has been collected."""
        items, self._items = self._items, []
        for start in range(0, len(items), self._limit):
            self._crew.start(self._send(tuple(items[start : start + self._limit])))
