"""Which group served something alike last: opaque keys, a bounded memory, the least recently used goes first.

A memory only: whether the group still has anything, and is still there, its user asks elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cluster.coordination.grants import Incarnation

_STEP = 4
"""So many outdated keys are dropped for each one that is remembered."""


class Affinity:
    """Keys live for `ttl_s` after their last use; at most `limit` are kept."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._groups: OrderedDict[bytes, tuple[Incarnation, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def group(self, key: bytes, now: float) -> Incarnation | None:
        """The incarnation that served it last."""
        found = self._groups.get(key)
        return found[0] if found is not None and now - found[1] <= self._ttl_s else None

    def remember(self, keys: Iterable[bytes], group: Incarnation, now: float) -> None:
        """All of `keys` were served there now."""
        for key in keys:
            self._groups[key] = (group, now)
            self._groups.move_to_end(key)
            self._drop(now)

    def forget(self, key: bytes) -> None:
        """Its group is gone."""
        self._groups.pop(key, None)

    def _drop(self, now: float) -> None:
        if len(self._groups) > self._limit:
            self._groups.popitem(last=False)
        for _ in range(_STEP):
            key = next(iter(self._groups))
            if now - self._groups[key][1] <= self._ttl_s:
                return
            del self._groups[key]
