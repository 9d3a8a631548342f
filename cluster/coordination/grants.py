"""What an ingress and the coordinator say to each other about one request: ask; grant, ticket or refusal; outcome.

Plain frozen values; durations in seconds, never clock readings, because no two processes share a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.message import message
from workers.plan import Finish
from workers.sequence import Priority

REFUSED_FULL = "cluster_full"
REFUSED_TENANT = "tenant_limit"
REFUSED_NEVER_FITS = "never_fits"
REFUSED_NO_GROUP = "no_group"
REFUSED_STALE = "stale_attempt"
REFUSED_LATE = "timed_out"

Incarnation = tuple[str, int]
"""A group and its epoch."""


@message
@dataclass(frozen=True, slots=True)
class Share:
    """Whose request it is, and what that tenant may take: `weight` is its part of the service while several wait,
    `max_waiting` how many of its requests may stand in the line."""

    tenant: str = "default"
    weight: float = 1.0
    max_waiting: int = 512


@message
@dataclass(frozen=True, slots=True)
class Ask:
    """Where may this attempt run? `prompt_tokens` counts what must be computed first (output that an earlier attempt
    sent included), `max_tokens` what may still come. `age` is how many seconds ago the request first arrived, `left`
    how many seconds it has until its deadline (None: any).
    `urgency`: lower goes first within a class; the tenant's ceiling has been applied.
    `replay`: an earlier attempt was accepted, so line bounds do not apply. `alone`: it is suspected of killing groups
    and must not share one with others. `avoid` names incarnations that this request saw die: never there again.
    `affinity` are opaque keys, the strongest first, by which groups that served something alike are preferred (the
    session, then the head of the prompt)."""

    request: str
    attempt: int
    model: str
    namespace: bytes
    prompt_tokens: int
    max_tokens: int
    priority: Priority = Priority.INTERACTIVE
    age: float = 0.0
    replay: bool = False
    avoid: tuple[Incarnation, ...] = ()
    share: Share = Share()
    urgency: int = 0
    left: float | None = None
    alone: bool = False
    affinity: tuple[bytes, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to submit one attempt to one incarnation of a group, at `address`, within `expires_s` from now.
    `blocks` is what it reserves there. `id` is unique over all groups and epochs."""

    id: str
    request: str
    attempt: int
    group: str
    epoch: int
    address: str
    blocks: int
    expires_s: float


@message
@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the waiting line: the grant, or a refusal, comes with the ingress's news (`LineNews`). `ahead` is how
    many stand before it now, `wait_s` how long that may take (None: nothing is known yet)."""

    request: str
    attempt: int
    ahead: int = 0
    wait_s: float | None = None


@message
@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now, or never: `code` is one of the REFUSED_… constants, `retry_after` seconds (None: do not try again)."""

    request: str
    attempt: int
    code: str
    message: str
    retry_after: float | None = None


@message
@dataclass(frozen=True, slots=True)
class Outcome:
    """How an accepted grant ended. `satisfied`: it was aborted because its client had all it wanted (a stop string), so
    that its output is as long as it would have been. After STOP and LENGTH the group has freed everything; after ABORT
    and ERROR that is known only when the group says so. Token counts are of this attempt."""

    grant: str
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    satisfied: bool = False


@message
@dataclass(frozen=True, slots=True)
class LineNews:
    """What became of an ingress's tickets. `number` is to be acknowledged with the next call; news that were not are
    told again. `life` identifies the coordinator's life: another one than before knows none of the tickets."""

    number: int
    life: int
    answers: tuple[Grant | Refusal, ...] = ()
