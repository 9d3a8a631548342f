"""Which namespaces have something cached in one group, how much and until when, as the group reported it."""

from __future__ import annotations

import heapq


class Chains:
    """Namespace -> (cached blocks, time of expiry). What expired is forgotten without being told."""

    def __init__(self) -> None:
        self._chains: dict[bytes, tuple[int, float]] = {}
        self._expiries: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._chains)

    def update(self, rows: tuple[tuple[bytes, int, float], ...], now: float, *, full: bool) -> None:
        """Take in (namespace, cached blocks, seconds until expiry) rows, 0 blocks for one that is gone. `full`: these
        are all there are."""
        if full:
            self._chains.clear()
            self._expiries.clear()
        for name, blocks, seconds in rows:
            if blocks and seconds > 0:
                self._chains[name] = (blocks, now + seconds)
                heapq.heappush(self._expiries, (now + seconds, name))
            else:
                self._chains.pop(name, None)
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, name = heapq.heappop(self._expiries)
            if name in self._chains and self._chains[name][1] <= now:
                del self._chains[name]
