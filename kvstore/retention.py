"""When the time of an idle block is over: `ttl` after its last use, later where its namespace is kept for longer.

A block that others follow waits for those: what stands on it is kept, so it must be. Knows neither states nor keys.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Kept:
    """The blocks of a namespace that outlive `ttl`, in the order in which they turned idle, and until when at least."""

    until: float
    blocks: dict[int, None] = field(default_factory=dict)


class Retention:
    """Every idle block stands in one of three places: resting (its `ttl` runs), kept (past it, with its namespace),
    stranded (past it, and waiting for the blocks that follow it). It moves once from one to the next, so that kept
    namespaces cost nothing while they wait. `kept_until` says until when a namespace is kept."""

    def __init__(self, ttl: float, kept_until: Callable[[bytes], float]) -> None:
        self.ttl = ttl
        self._kept_until = kept_until
        self._resting: OrderedDict[int, tuple[float, bytes]] = OrderedDict()
        self._kept: dict[bytes, _Kept] = {}
        self._ends: list[tuple[float, bytes]] = []
        self._stranded: set[int] = set()

    def rest(self, block: int, namespace: bytes, now: float) -> None:
        """`block` turned idle at `now`, which never runs backwards."""
        self._resting[block] = (now, namespace)

    def wake(self, block: int, namespace: bytes) -> None:
        """`block` is idle no more; one that has been handed out as over is not known here."""
        if self._resting.pop(block, None) is not None:
            return
        self._stranded.discard(block)
        kept = self._kept.get(namespace)
        if kept:
            kept.blocks.pop(block, None)
            if not kept.blocks:
                del self._kept[namespace]

    def strand(self, block: int) -> None:
        """The time of `block` is over, but others follow it."""
        self._stranded.add(block)

    def is_stranded(self, block: int) -> bool:
        return block in self._stranded

    def over(self, now: float) -> Iterator[int]:
        """Blocks whose time is over, each before what it follows. Purge or strand each before asking for the next."""
        while self._resting:
            block, (since, namespace) = next(iter(self._resting.items()))
            if since + self.ttl > now:
                break
            del self._resting[block]
            until = self._kept_until(namespace)
            if until > now:
                self._keep(block, namespace, until)
            else:
                yield block
        while self._ends and self._ends[0][0] <= now:
            yield from self._end_next(now)

    def next_end(self) -> float | None:
        """When `over` should be asked again."""
        oldest = next(iter(self._resting.values()), None)
        times = [oldest[0] + self.ttl] if oldest else []
        if self._ends:
            times.append(self._ends[0][0])
        return min(times, default=None)

    def check(self, idle: set[int]) -> None:
        """Every idle block stands in one place."""
        kept = [block for namespace in self._kept.values() for block in namespace.blocks]
        places = [*self._resting, *kept, *self._stranded]
        assert len(places) == len(set(places)) and set(places) == idle, "idle blocks and their times differ"
        assert {(kept.until, name) for name, kept in self._kept.items()} <= set(self._ends)

    def _keep(self, block: int, namespace: bytes, until: float) -> None:
        if namespace not in self._kept:
            self._kept[namespace] = _Kept(until)
            self._push(until, namespace)
        self._kept[namespace].blocks[block] = None

    def _push(self, until: float, namespace: bytes) -> None:
        heapq.heappush(self._ends, (until, namespace))
        if len(self._ends) > 2 * len(self._kept) + 64:  # most of it is about namespaces that were used again
            self._ends = [(kept.until, name) for name, kept in self._kept.items()]
            heapq.heapify(self._ends)

    def _end_next(self, now: float) -> Iterator[int]:
        """The namespace that was to be kept for the shortest: it was used again since, or its blocks are over."""
        until, namespace = heapq.heappop(self._ends)
        kept = self._kept.get(namespace)
        if kept is None or kept.until != until:
            return
        kept.until = self._kept_until(namespace)
        if kept.until > now:
            self._push(kept.until, namespace)
        else:
            yield from self._kept.pop(namespace).blocks
