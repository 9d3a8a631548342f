"""Bells: what wakes a waiting call of an actor when something happens in another of its threads.

Each concurrency group of an async actor has an event loop of its own; whoever waits belongs to one, whoever rings may
be anywhere. Knows nothing of what is waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_Listener = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Bells:
    """One bell per name; each may have several listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[_Listener]] = {}

    def ring(self, names: Iterable[str]) -> None:
        """Set the events of all that listen to one of `names`. From any thread; returns at once."""
        for name in names:
            with self._lock:
                for loop, event in self._listeners.get(name, ()):
                    loop.call_soon_threadsafe(event.set)

    @contextmanager
    def listen(self, name: str) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set at every ring of `name`. Clear it before looking, not after: then
        no ring gets lost."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.setdefault(name, []).append(listener)
        try:
            yield listener[1]
        finally:
            with self._lock:
                mine = self._listeners[name]
                mine.remove(listener)
                if not mine:
                    del self._listeners[name]
