"""What a client wants, how much it puts up with, and one attempt at it. Values only; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.coordination.grants import Ask, Grant, Incarnation, Outcome, Share
from kvstore.sessions import Terms
from workers.plan import Finish
from workers.sequence import Priority, Request, Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """One generation, with the namespace that its prompt may share."""

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

    def ask(self, attempt: int, sent: int, age: float, avoid: tuple[Incarnation, ...]) -> Ask:
        """Where may attempt number `attempt` run, now that the client has been sent `sent` tokens?"""
        return Ask(
            request=self.id,
            attempt=attempt,
            model=self.model,
            namespace=self.namespace,
            prompt_tokens=len(self.prompt) + sent,
            max_tokens=self.sampling.max_tokens - sent,
            priority=self.priority,
            age=age,
            replay=attempt > 0,
            avoid=avoid,
        )

    def complete(self, output: list[int]) -> Finish | None:
        """How the generation has ended if `output` is all of it, None if more must come."""
        if output and output[-1] in self.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(output) >= self.sampling.max_tokens else None


@dataclass(slots=True)
class Attempt:
    """Work under a grant. `resumed` is the output that was sent before; `epoch` the highest heard from the group."""

    grant: Grant
    resumed: tuple[int, ...]
    cached: int = 0
    epoch: int = 0

    def request(self, work: Work, age: float) -> Request:
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
            age=age,
        )

    def outcome(self, work: Work, finish: Finish, sent: int) -> Outcome:
        """What the coordinator gets at the end, when the client has been sent `sent` tokens in all."""
        prompt = len(work.prompt) + len(self.resumed)
        return Outcome(self.grant.id, finish, prompt, self.cached, sent - len(self.resumed))


@dataclass(frozen=True, slots=True)
class Endurance:
    """How much a request puts up with: deaths of groups while it ran there; other attempts that came to nothing;
    seconds of waiting for a place at a stretch (`patience_s`) and in all, running included (`timeout_s`, None: any)."""

    deaths: int = 2
    misses: int = 8
    patience_s: float = 120.0
    timeout_s: float | None = None
