"""Who shares cached prefixes with whom: a request's scope, and the keys that follow from it.

The client names its session, never its namespace. Every key is an HMAC: whoever sees one learns neither a name nor a
prompt from it. Knows no API key and no block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

from cluster.generation import Generation
from cluster.text.prefixes import Prefixes
from kvstore.chain import derive_namespace
from kvstore.sessions import Terms

HEAD_TOKENS = 256
"""Prompts that begin with the same so many tokens are placed alike."""
LEAST_PUBLIC_TOKENS = 32
"""So much of a public prompt is worth placing by: every chat begins with the same few tokens, and less fills no block.
"""


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


class Namespaces:
    """The keys of a service's generations. `secrets`: the one in use first; under the others, which are being retired,
    sessions are still found and forgotten, but nothing new is cached. `revisions` by model; `tenants` is asked at every
    generation, because the file of tenants may change; `public` are the prompts of each model that all share."""

    def __init__(
        self,
        secrets: Sequence[bytes],
        revisions: Mapping[str, str],
        *,
        cache_scope: str = "auto",
        tenants: Callable[[], int] = lambda: 1,
        public: Mapping[str, Prefixes] | None = None,
    ) -> None:
        choose_scope(cache_scope, 1)
        if not all(secrets) or not secrets:
            raise ValueError("the secret that keys the namespaces is empty")
        self._secrets = tuple(secrets)
        self._revisions = dict(revisions)
        self._cache_scope = cache_scope
        self._tenants = tenants
        self._public = dict(public or {})

    @property
    def scope(self) -> Scope:
        """Who shares with whom now."""
        return choose_scope(self._cache_scope, self._tenants())

    def keys(self, generation: Generation) -> CacheKeys:
        """Where `generation` caches and how it is placed."""
        secret, scope, revision = self._secrets[0], self.scope, self._revisions[generation.model]
        own = namespace(
            secret,
            scope,
            tenant=generation.tenant,
            session=generation.session,
            request=generation.id,
            revision=revision,
        )
        prefixes = self._public.get(generation.model)
        shared = prefixes.longest(generation.prompt) if prefixes else 0
        lasting = scope is Scope.TENANT or generation.session is not None
        terms = Terms(
            tenant=derive_namespace(secret, "quota", generation.tenant),
            session_blocks=generation.quota.session_blocks,
            tenant_blocks=generation.quota.tenant_blocks,
            keep_s=generation.keep_s if lasting else 0.0,  # nobody can ask for it again
            public=derive_namespace(secret, "public", revision) if shared else b"",
            public_tokens=shared,
        )
        return CacheKeys(own, terms, self._affinity(generation, scope, own, shared))

    def of_session(self, tenant: str, session: str) -> tuple[bytes, ...]:
        """Every namespace, of any model and under any secret, in which something of the session may be cached.

        Where a tenant's requests share one cache, that one is the session's too. With "auto" both kinds count: what was
        cached before the number of tenants changed is there still.
        """
        scopes = tuple(Scope) if self._cache_scope == "auto" else (self.scope,)
        every = product(self._secrets, scopes, self._revisions.values())
        found = [
            namespace(secret, scope, tenant=tenant, session=session, request="", revision=revision)
            for secret, scope, revision in every
        ]
        return tuple(dict.fromkeys(found))

    def _affinity(self, generation: Generation, scope: Scope, own: bytes, public: int) -> tuple[bytes, ...]:
        """The session, then the head of the prompt among its tenant's and among the public ones: each where somebody
        may have cached it."""
        model, prompt, keys = generation.model, generation.prompt, []
        if generation.session is not None:
            keys.append(self._placed("session", model, generation.tenant, generation.session))
        if scope is Scope.TENANT:
            keys.append(self._placed("head", model, own, _packed(prompt[:HEAD_TOKENS])))
        if public >= LEAST_PUBLIC_TOKENS:
            keys.append(self._placed("public", model, _packed(prompt[: min(HEAD_TOKENS, public)])))
        return tuple(keys)

    def _placed(self, kind: str, *fields: str | bytes) -> bytes:
        return derive_namespace(self._secrets[0], "placed", kind, *fields)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
