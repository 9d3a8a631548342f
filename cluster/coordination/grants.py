"""What an ingress and the coordinator say to each other about one request: ask, grant or refusal, outcome.

Plain frozen values; durations in seconds, never clock readings, because no two processes share a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.plan import Finish
from workers.sequence import Priority

REFUSED_FULL = "cluster_full"
REFUSED_NEVER_FITS = "never_fits"
REFUSED_NO_GROUP = "no_group"
REFUSED_STALE = "stale_attempt"

Incarnation = tuple[str, int]
"""A group and its epoch."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Where may this attempt run? `prompt_tokens` counts what must be computed first (output that an earlier attempt
    sent included), `max_tokens` what may still come. `age` is how many seconds ago the request first arrived.
    `replay`: an earlier attempt was accepted, so queue bounds do not apply. `avoid` names incarnations that this
    request saw die: it is never placed there again."""

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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now, or never: `code` is one of the REFUSED_… constants, `retry_after` seconds (None: do not try again)."""

    request: str
    attempt: int
    code: str
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an accepted grant ended. After STOP and LENGTH the group has freed everything; after ABORT and ERROR that is
    known only when the group says so. Token counts are of this attempt."""

    grant: str
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
