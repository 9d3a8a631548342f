"""What is cached for whom: per namespace the indexed blocks, the time of last use and the terms; per tenant the sum.

Knows no keys and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvstore.message import message

SessionRows = tuple[tuple[bytes, int, float], ...]
"""(namespace, indexed blocks, seconds until expiry) each."""


@message
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
class _Holding:
    """The blocks of one namespace or tenant: all, and the idle ones, oldest first; `limit` is its quota."""

    limit: int | None = None
    blocks: set[int] = field(default_factory=set)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def surplus(self) -> int | None:
        """The oldest idle block of a holding that is over its quota."""
        if self.limit is None or len(self.blocks) <= self.limit:
            return None
        return next(iter(self.idle), None)


@dataclass(slots=True)
class _Session:
    used: float
    tenant: bytes = b""
    kept_until: float = float("-inf")
    own: _Holding = field(default_factory=_Holding)


class Sessions:
    """Indexed blocks by namespace and by tenant. A namespace without any is forgotten, and so is a tenant. Unused ones
    live for `ttl` seconds, longer where their terms said so."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._sessions: dict[bytes, _Session] = {}
        self._tenants: dict[bytes, _Holding] = {}
        self._changed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def touch(self, namespace: bytes, terms: Terms, now: float) -> None:
        """The namespace was used at `now` under `terms`: what it has cached lives on."""
        session = self._sessions.get(namespace)
        if session:
            self._use(session, terms, now)
            self._changed.add(namespace)

    def grew(self, namespace: bytes, block: int, terms: Terms, now: float) -> None:
        """`block` was indexed for the namespace."""
        session = self._sessions.get(namespace)
        if session is None:
            session = self._sessions[namespace] = _Session(now, terms.tenant)
        for holding in self._holdings(session, create=True):
            holding.blocks.add(block)
        self._use(session, terms, now)
        self._changed.add(namespace)

    def shrank(self, namespace: bytes, block: int) -> None:
        """`block` is indexed no more."""
        session = self._sessions[namespace]
        for holding in self._holdings(session):
            holding.blocks.remove(block)
            holding.idle.pop(block, None)
        if not session.own.blocks:
            del self._sessions[namespace]
        if session.tenant in self._tenants and not self._tenants[session.tenant].blocks:
            del self._tenants[session.tenant]
        self._changed.add(namespace)

    def rest(self, namespace: bytes, block: int) -> None:
        """`block` turned idle."""
        for holding in self._holdings(self._sessions[namespace]):
            holding.idle[block] = None

    def wake(self, namespace: bytes, block: int) -> None:
        """`block` is idle no more."""
        for holding in self._holdings(self._sessions[namespace]):
            del holding.idle[block]

    def blocks(self, namespace: bytes) -> int:
        """Blocks that the namespace has indexed."""
        session = self._sessions.get(namespace)
        return len(session.own.blocks) if session else 0

    def members(self, namespace: bytes) -> set[int]:
        """Those blocks."""
        session = self._sessions.get(namespace)
        return set(session.own.blocks) if session else set()

    def kept_until(self, namespace: bytes) -> float:
        """Until when its terms keep the namespace, whatever `ttl` says."""
        session = self._sessions.get(namespace)
        return session.kept_until if session else float("-inf")

    def surplus(self, namespace: bytes) -> int | None:
        """The block that the namespace or its tenant must give up next, being over quota; None when nothing is idle or
        too much. It has no indexed children: an idle child is older than its parent."""
        session = self._sessions.get(namespace)
        if session is None:
            return None
        surpluses = (holding.surplus for holding in self._holdings(session))
        return next((block for block in surpluses if block is not None), None)

    def rows(self, now: float) -> SessionRows:
        """All of them."""
        return tuple((name, len(s.own.blocks), self._expiry(s) - now) for name, s in self._sessions.items())

    def changes(self, now: float) -> SessionRows:
        """The same for what changed since the last call; 0 blocks means gone."""
        rows = []
        for name in self._changed:
            session = self._sessions.get(name)
            rows.append((name, len(session.own.blocks), self._expiry(session) - now) if session else (name, 0, 0.0))
        self._changed.clear()
        return tuple(rows)

    def check(self, indexed: dict[int, bytes], idle: list[int]) -> None:
        """Agrees with the index (block → namespace) and with the pool's idle blocks, oldest first."""
        for name, session in self._sessions.items():
            assert session.own.blocks == {block for block, owner in indexed.items() if owner == name} != set()
        assert {indexed[block] for block in indexed} == set(self._sessions), "a namespace is not known"
        for name, session in self._sessions.items():
            assert list(session.own.idle) == [block for block in idle if indexed[block] == name]
        tenant_of = {name: session.tenant for name, session in self._sessions.items() if session.tenant}
        assert set(tenant_of.values()) == set(self._tenants)
        for tenant, holding in self._tenants.items():
            assert holding.blocks == {block for block, owner in indexed.items() if tenant_of.get(owner) == tenant}
            assert list(holding.idle) == [block for block in idle if tenant_of.get(indexed[block]) == tenant]

    def _use(self, session: _Session, terms: Terms, now: float) -> None:
        session.used = now
        session.kept_until = max(session.kept_until, now + terms.keep_s if terms.keep_s else float("-inf"))
        session.own.limit = terms.session_blocks
        tenant = self._tenants.get(session.tenant)
        if tenant:
            tenant.limit = terms.tenant_blocks

    def _holdings(self, session: _Session, create: bool = False) -> tuple[_Holding, ...]:
        if not session.tenant:
            return (session.own,)
        if create:
            self._tenants.setdefault(session.tenant, _Holding())
        return (session.own, self._tenants[session.tenant])

    def _expiry(self, session: _Session) -> float:
        return max(session.used + self.ttl, session.kept_until)
