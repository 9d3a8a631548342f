"""What a client wants, how much it puts up with, where it stands, and one attempt at it. Values; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.coordination.grants import Grant, Incarnation, Outcome, Share
from kvstore.sessions import Terms
from workers.plan import Finish
from workers.sequence import Priority, Request, Sampling


class Phase(Enum):
    """Where a request stands. ASKING, RESTING and SUBMITTING are waiting for a place outside the line, QUEUED is
    waiting in it."""

    NEW = 0
    ASKING = 1
    RESTING = 2
    QUEUED = 3
    SUBMITTING = 4
    RUNNING = 5
    ENDED = 6


@dataclass(frozen=True, slots=True)
class Work:
    """One generation, with the namespace that its prompt may share. `timeout_s` counts from its arrival (None: as its
    server has it)."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    model: str
    namespace: bytes
    priority: Priority = Priority.INTERACTIVE
    share: Share = Share()
    urgency: int = 0
    timeout_s: float | None = None
    terms: Terms = Terms()
    affinity: tuple[bytes, ...] = ()

    def complete(self, output: list[int]) -> Finish | None:
        """How the generation has ended if `output` is all of it, None if more must come. One that asks for no token is
        complete only when a group says so: it is the prefill that counts."""
        if not output:
            return None
        if output[-1] in self.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(output) >= self.sampling.max_tokens else None


@dataclass(slots=True)
class Attempt:
    """Work under a grant. `resumed` is the output that was sent before; `epoch` the highest heard from the group."""

    grant: Grant
    resumed: tuple[int, ...]
    cached: int = 0
    epoch: int = 0

    @property
    def incarnation(self) -> Incarnation:
        """Whom it runs at; a group that had to join again while it ran goes on under a higher epoch."""
        return self.grant.group, max(self.grant.epoch, self.epoch)

    def request(self, work: Work, left: float | None) -> Request:
        """What the group gets."""
        return Request(
            id=work.id,
            prompt=work.prompt,
            sampling=work.sampling,
            namespace=work.namespace,
            attempt=self.grant.attempt,
            resumed=self.resumed,
            priority=work.priority,
            grant=self.grant.id,
            granted_blocks=self.grant.blocks,
            left=left,
            terms=work.terms,
        )

    def outcome(self, work: Work, finish: Finish, sent: int, *, satisfied: bool = False) -> Outcome:
        """What the coordinator gets at the end, when the client has been sent `sent` tokens in all."""
        prompt = len(work.prompt) + len(self.resumed)
        return Outcome(self.grant.id, finish, prompt, self.cached, sent - len(self.resumed), satisfied)


@dataclass(frozen=True, slots=True)
class Endurance:
    """How much a request puts up with. From its `deaths`-th death of a group that ran it on it runs alone, and one more
    ends it; other attempts that come to nothing are bounded by `misses`. Seconds: of waiting for a place at a stretch,
    outside the line (`patience_s`; a replay that has a deadline waits for as long as that), and in all, running
    included, where the work names no time of its own (`timeout_s`, None: any). A place in the line is asked for again
    every `confirm_s`, in case the coordinator has lost it unseen. In its first `grace_s` it does not take for an answer
    that there is no group: a coordinator that was restarted knows them with their next reports only."""

    deaths: int = 2
    misses: int = 8
    patience_s: float = 120.0
    timeout_s: float | None = None
    confirm_s: float = 20.0
    grace_s: float = 5.0
