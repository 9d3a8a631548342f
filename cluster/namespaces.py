"""Who shares cached prefixes with whom: a request's scope, and the namespace that follows from it.

The client names its session, never its namespace. Knows no API key and no block.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvstore.chain import derive_namespace
from kvstore.sessions import Terms


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Where what a generation computes is cached, how it stays there, and by what likeness it is placed."""

    namespace: bytes
    terms: Terms = Terms()
    affinity: tuple[bytes, ...] = ()


class Scope(Enum):
    """What shares a cache: the requests of one session of one tenant, or all of a tenant."""

    SESSION = "session"
    TENANT = "tenant"


def choose_scope(cache_scope: str, tenants: int) -> Scope:
    """The scope that config's `cache_scope` ("auto", "tenant", "session") means with so many tenants: auto is tenant
    while there is one, session as soon as several must be kept apart. ValueError for another word."""
    if cache_scope == "auto":
        return Scope.TENANT if tenants <= 1 else Scope.SESSION
    try:
        return Scope(cache_scope)
    except ValueError:
        raise ValueError(f"cache_scope must be auto, tenant or session, got {cache_scope!r}") from None


def namespace(secret: bytes, scope: Scope, *, tenant: str, session: str | None, request: str, revision: str) -> bytes:
    """HMAC-SHA256(secret, typed and length-prefixed fields): 32 bytes that no client can choose or guess.

    In session scope a request without a session shares with itself alone. `revision` is the model's, so that new
    weights never meet old blocks. ValueError for an empty secret.
    """
    if not secret:
        raise ValueError("the secret that keys the namespaces is empty")
    if scope is Scope.TENANT:
        return derive_namespace(secret, "tenant", tenant, revision)
    if session is not None:
        return derive_namespace(secret, "session", tenant, session, revision)
    return derive_namespace(secret, "request", tenant, request, revision)
