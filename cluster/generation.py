"""What the HTTP side and the cluster side of an ingress say to each other: one generation, its events, health, limits.

Tokens only: text, JSON and HTTP stay above, groups and grants below.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.coordination.cards import GroupCard, SessionCopy
from cluster.coordination.grants import Share
from workers.plan import TokenEvent
from workers.sequence import Priority, Sampling


@dataclass(frozen=True, slots=True)
class Quota:
    """The most blocks that a session, and all of its tenant, may keep cached (None: no bound)."""

    session_blocks: int | None = None
    tenant_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice to generate. `id` is unique and ours, never the client's; `prompt` is not empty; `model` is the
    model's canonical name; `session` is the client's own name for its conversation (a namespace is derived from it
    elsewhere), None when it gave none.

    `urgency` orders the requests of a class, lower first, the tenant's ceiling applied. `timeout_s` is the deadline,
    counted from now (None: the server's default); `keep_s` how long the client wants its session's cache kept, as far
    as its tenant may. `share`: whose request it is. `sampling.max_tokens` 0 fills the cache and generates nothing."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    model: str
    session: str | None = None
    share: Share = Share()
    priority: Priority = Priority.INTERACTIVE
    urgency: int = 0
    timeout_s: float | None = None
    keep_s: float = 0.0
    quota: Quota = Quota()

    @property
    def tenant(self) -> str:
        """The name of whose request it is."""
        return self.share.tenant


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """One group as the ingress sees it: ready when it has generated a token and its steps advance with its work."""

    group: str
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a request sent now would be answered; if not, `reason` is one sentence for the operator."""

    ready: bool
    reason: str = ""
    groups: tuple[GroupHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What requests are checked against. `names` are those that clients may use, the canonical one first.

    `max_model_len` is the context in tokens, prompt and output together. `pool_tokens` is the most tokens that one
    request can ever hold in the cluster's largest pool, None while no group is up. `vocab_size` counts the model's
    rows, padding included. `eos_ids` end a sequence unless the client asks to ignore them.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    pool_tokens: int | None = None
    eos_ids: frozenset[int] = frozenset()
    revision: str = ""

    def sized(self, groups: Iterable[GroupCard]) -> ModelCard:
        """The same with the largest pool of those among `groups` that serve this model."""
        pools = [group.extent.tokens_for(group.blocks) for group in groups if self.names[0] in group.models]
        return replace(self, pool_tokens=max(pools, default=None))


class Completer(Protocol):
    """The cluster, seen from a route."""

    def generate(self, generation: Generation) -> AsyncGenerator[TokenEvent, None]:
        """Events of one generation, the last with `finish`. Raises ApiError before the first event when refused.

        Closing the generator, or cancelling the task that reads it, aborts the generation."""
        ...

    def satisfy(self, id: str) -> None:
        """The client of generation `id` has all it wanted (a stop string came): what runs on is aborted, and counts as
        done. To be called before the generator is closed; closing alone means that the client has left."""
        ...

    def ahead(self, id: str) -> int | None:
        """How many stood before generation `id` in the waiting line when that was last told; None while it does not
        stand there, or is not under way."""
        ...

    async def health(self) -> Health:
        """Progress-based: ready means that tokens flow, or would."""
        ...

    async def session(self, tenant: str, session: str) -> tuple[SessionCopy, ...]:
        """What is cached of a tenant's session, by group; () when nothing is. ApiError when nobody knows now."""
        ...

    async def forget_session(self, tenant: str, session: str) -> int:
        """Forget and zero a session in every group; returns the blocks once every group has confirmed. ApiError when
        one that is not known to be dead does not."""
        ...
