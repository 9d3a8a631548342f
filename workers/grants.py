"""The coordinator's grants as a group sees them: good once, never after they were voided."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED = 65_536
"""How many accepted and how many void grants are remembered, to refuse a second or a late use."""

Key = tuple[str, int]


class GrantBook:
    """Acceptances and voids, and what of them the coordinator has not been told yet. "" is no grant: what came in
    without one is remembered by itself."""

    def __init__(self) -> None:
        self._accepted: OrderedDict[str | Key, None] = OrderedDict()
        self._void: OrderedDict[str | Key, None] = OrderedDict()
        self._live: dict[Key, str] = {}
        self._news: tuple[list[str], list[str]] = ([], [])

    def accepted(self, grant: str, key: Key) -> bool:
        """Whether `grant`, or without one request `key`, was used before: a message may come twice."""
        return (grant or key) in self._accepted

    def is_void(self, grant: str) -> bool:
        return grant in self._void

    def accept(self, grant: str, key: Key) -> None:
        """Request `key` is in by `grant`."""
        _remember(self._accepted, grant or key)
        if grant:
            self._live[key] = grant
            self._news[0].append(grant)

    def end(self, key: Key) -> None:
        """Request `key` has ended: its grant may be acknowledged as void now."""
        self._live.pop(key, None)

    def void(self, grants: Iterable[str]) -> None:
        """Refuse `grants` from now on and acknowledge that; one whose request is still live not before it has ended
        (the coordinator names it again until then)."""
        live = frozenset(self._live.values())
        for grant in grants:
            if grant in live:
                continue
            if grant not in self._accepted:
                _remember(self._void, grant)
            self._news[1].append(grant)

    @property
    def live(self) -> tuple[str, ...]:
        """Grants whose request has not ended."""
        return tuple(self._live.values())

    def news(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(accepted, voided) since the last call."""
        accepted, voided = (tuple(grants) for grants in self._news)
        self._news = ([], [])
        return accepted, voided


def _remember(memory: OrderedDict[str | Key, None], name: str | Key) -> None:
    memory[name] = None
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
