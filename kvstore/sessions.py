"""What is cached for whom: per namespace the indexed blocks and the time of last use. Knows no keys and no tokens."""

from __future__ import annotations

from dataclasses import dataclass

SessionRows = tuple[tuple[bytes, int, float], ...]
"""(namespace, indexed blocks, seconds until expiry) each."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How what a request computes stays cached. `session_blocks` and `tenant_blocks` bound the blocks of its namespace
    and of `tenant`, idle ones (None: no bound): over it they lose their own oldest idle blocks. `keep_s` is how long
    the namespace's contents live after this use, where that is longer than the group's own time. The blocks among
    the first `public_tokens` belong to the namespace `public`, which all share, not to the request's own."""

    tenant: bytes = b""
    session_blocks: int | None = None
    tenant_blocks: int | None = None
    keep_s: float = 0.0
    public: bytes = b""
    public_tokens: int = 0


@dataclass(slots=True)
class _Session:
    blocks: int
    used: float


class Sessions:
    """Counts indexed blocks by namespace. A namespace without any is forgotten."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._sessions: dict[bytes, _Session] = {}
        self._changed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def touch(self, namespace: bytes, now: float) -> None:
        """The namespace was used at `now`: what it has cached lives on for another `ttl`."""
        session = self._sessions.get(namespace)
        if session:
            session.used = now
            self._changed.add(namespace)

    def grew(self, namespace: bytes, now: float) -> None:
        session = self._sessions.setdefault(namespace, _Session(0, now))
        session.blocks += 1
        session.used = now
        self._changed.add(namespace)

    def shrank(self, namespace: bytes) -> None:
        session = self._sessions[namespace]
        session.blocks -= 1
        if not session.blocks:
            del self._sessions[namespace]
        self._changed.add(namespace)

    def blocks(self, namespace: bytes) -> int:
        """Blocks that the namespace has indexed."""
        session = self._sessions.get(namespace)
        return session.blocks if session else 0

    def rows(self, now: float) -> SessionRows:
        """All of them."""
        return tuple((name, s.blocks, s.used + self.ttl - now) for name, s in self._sessions.items())

    def changes(self, now: float) -> SessionRows:
        """The same for what changed since the last call; 0 blocks means gone."""
        rows = []
        for name in self._changed:
            session = self._sessions.get(name)
            rows.append((name, session.blocks, session.used + self.ttl - now) if session else (name, 0, 0.0))
        self._changed.clear()
        return tuple(rows)
