"""Which namespaces have something cached in one group, how much and until when, as the group reported it."""

from __future__ import annotations

from cluster.coordination.timers import Timers


class Chains:
    """Namespace -> (cached blocks, time of expiry). What expired is forgotten without being told."""

    def __init__(self) -> None:
        self._chains: dict[bytes, tuple[int, float]] = {}
        self._expiries: Timers[bytes] = Timers()

    def __len__(self) -> int:
        return len(self._chains)

    def cached(self, namespace: bytes, now: float) -> tuple[int, float]:
        """(blocks, seconds until they expire); (0, 0) when nothing is known to be cached."""
        blocks, at = self._chains.get(namespace, (0, now))
        return (blocks, at - now) if at > now else (0, 0.0)

    def update(self, rows: tuple[tuple[bytes, int, float], ...], now: float, *, full: bool) -> None:
        """Take in (namespace, cached blocks, seconds until expiry) rows, 0 blocks for one that is gone. `full`: these
        are all there are."""
        if full:
            self._chains.clear()
            self._expiries = Timers()
        for name, blocks, seconds in rows:
            if blocks and seconds > 0:
                self._chains[name] = (blocks, now + seconds)
                self._expiries.add(now + seconds, name)
            else:
                self._chains.pop(name, None)
        for _, name in self._expiries.due(now):
            if name in self._chains and self._chains[name][1] <= now:
                del self._chains[name]
        self._expiries.trim(len(self._chains), self._counts)

    def _counts(self, at: float, name: bytes) -> bool:
        return self._chains.get(name, (0, 0.0))[1] == at
