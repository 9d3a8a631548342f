"""What one request has been through: what it was sent, and what went wrong, as far as either shapes its next ask.

Keeps count; when enough is enough is decided elsewhere.
"""

from __future__ import annotations

from cluster.coordination.grants import Ask, Incarnation, Refusal
from cluster.requests.work import Endurance, Work
from workers.logprobs import Logprobs
from workers.plan import Finish, TokenEvent


class History:
    """`attempt` is the number of the attempt that counts. `accepted` counts the attempts that a group took, `deaths`
    the groups that died while they ran it, `misses` other attempts that came to nothing. `admitted`: it has had a grant
    of the coordinator, or a group had taken it; `troubled`: something went wrong, so that its client waits already.
    `avoid` are incarnations that it saw die, `refusal` is the last that this attempt got."""

    def __init__(self, work: Work, endurance: Endurance) -> None:
        self.attempt = self.accepted = self.deaths = self.misses = 0
        self.admitted = self.troubled = False
        self.avoid: tuple[Incarnation, ...] = ()
        self.refusal: Refusal | None = None
        self._work = work
        self._endurance = endurance

    @property
    def alone(self) -> bool:
        """Whether it is suspected of killing groups and must not share one."""
        return self.deaths >= self._endurance.deaths

    @property
    def exhausted(self) -> bool:
        """Whether too many attempts have come to nothing."""
        return self.misses > self._endurance.misses

    def begin_attempt(self) -> None:
        """The one that counted has come to nothing."""
        self.attempt += 1
        self.refusal = None

    def shun(self, incarnation: Incarnation) -> None:
        """Never there again."""
        self.avoid = (*self.avoid, incarnation)

    def ask(self, sent: int, *, age: float, left: float | None) -> Ask:
        """Where may the attempt that counts run, now that the client has been sent `sent` tokens?"""
        work = self._work
        return Ask(
            request=work.id,
            attempt=self.attempt,
            model=work.model,
            namespace=work.namespace,
            prompt_tokens=len(work.prompt) + sent,
            max_tokens=work.sampling.max_tokens - sent,
            priority=work.priority,
            age=age,
            replay=self.admitted,
            avoid=self.avoid,
            share=work.share,
            urgency=work.urgency,
            left=left,
            alone=self.alone,
            affinity=work.affinity,
        )


class Transcript:
    """The output that the client has been sent, and `cached`: prompt tokens that the first attempt found in the
    cache (None: nothing has come yet). `scored`: it has been sent what it wanted to know of its prompt's tokens."""

    def __init__(self, request: str) -> None:
        self.output: list[int] = []
        self.cached: int | None = None
        self.scored = False
        self._request = request

    def add(self, news: TokenEvent) -> TokenEvent | None:
        """The client's event for what of `news` is new, not its end; None when something between is missing."""
        have = len(self.output)
        if news.index > have:
            return None
        if self.cached is None:
            self.cached = news.cached
        known = have - news.index
        tokens = news.tokens[known:]
        self.output.extend(tokens)
        logprobs = None if news.logprobs is None else news.logprobs.since(min(known, len(news.tokens)))
        prompt = None if self.scored else news.prompt
        self.scored = self.scored or prompt is not None
        return self.event(news.attempt, tokens, logprobs=logprobs, prompt=prompt)

    def event(
        self,
        attempt: int,
        tokens: tuple[int, ...] = (),
        finish: Finish | None = None,
        error: str | None = None,
        logprobs: Logprobs | None = None,
        prompt: Logprobs | None = None,
    ) -> TokenEvent:
        """The client's event for `tokens`, the last of the output."""
        index = len(self.output) - len(tokens)
        return TokenEvent(self._request, attempt, index, tokens, finish, self.cached or 0, error, logprobs, prompt)
