"""A request as it enters a group, and the sequence that the scheduler makes of it. No torch, no Ray, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from kvstore.chain import BlockKey
from kvstore.message import message
from kvstore.sessions import Terms
from kvstore.table import BlockTable
from workers.logprobs import Logprobs, join
from workers.plan import PENDING, Bend, Draw, Finish, Penalties, Score, TokenEvent


class Priority(IntEnum):
    """Classes, best first: an interactive request may preempt a batch one."""

    INTERACTIVE = 0
    BATCH = 1


@message
@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn and when it ends. `stop_ids` end it (the end-of-sequence ids are among them
    unless the client asked to ignore them); `seed` is always fixed by the ingress, so that a replay draws the same.
    `logprobs` and `prompt_logprobs` ask for log-probabilities of the output's and the prompt's tokens, each with so
    many likeliest ones (None: not asked for)."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    penalties: Penalties | None = None

    def draw(self, position: int) -> Draw:
        """The draw of the token at `position` of the sequence."""
        return Draw(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, position, self.logprobs)


@message
@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one request. `resumed` is output that an earlier attempt already sent: it is computed again, not
    sampled again. `namespace` is the prefix cache's root (opaque bytes); `grant` names the coordinator's permission and
    `granted_blocks` what it reserved; `left` is how many seconds remain until its deadline: one that has passed is
    never prefilled. `terms` say how long and how much of it stays cached. `sampling.max_tokens` 0 prefills and
    generates nothing."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    namespace: bytes
    attempt: int = 0
    resumed: tuple[int, ...] = ()
    priority: Priority = Priority.INTERACTIVE
    grant: str = ""
    granted_blocks: int = 0
    left: float | None = None
    terms: Terms = Terms()

    @property
    def longest(self) -> int:
        """Tokens of the sequence when it has generated all it may."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way; `arrived` is when it came to this group.

    `tokens` are those known so far; `pending` more are being sampled by steps in flight, the last of them as sampled
    row `source` of the latest step. `computed` counts the tokens whose keys and values are in place once the launched
    steps have run, `reached` how far that ever got. `keys` is the hash chain of the tokens as far as it was needed.
    A sequence without a table waits, until `deadline` at most. `blocks` is the most that it has held at a time,
    `stepped` the last step that had a part for it.
    `forgotten`: its namespace was purged while it was here, so that nothing of it stays cached.
    `scores_prompt`: the log-probabilities of its prompt's tokens are wanted.
    `scored` counts the prompt's tokens, from its second on, whose log-probabilities are known; `scores` are those that
    no event has carried yet. `distinct` are the prompt's ids, each once, where penalties ask for them.
    """

    request: Request
    arrived: float
    tokens: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    source: int = 0
    table: BlockTable | None = None
    cached: int = 0
    preemptions: int = 0
    bypassed: int = 0
    blocked_at: float | None = None
    reached: int = 0
    deadline: float | None = None
    blocks: int = 0
    stepped: int = 0
    forgotten: bool = False
    finish: Finish | None = None
    scores_prompt: bool = False
    scored: int = 0
    scores: list[Logprobs] = field(default_factory=list)
    distinct: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.resumed]
        # What was sent before needs none again.
        self.scores_prompt = self.request.sampling.prompt_logprobs is not None and not self.request.resumed

    @property
    def length(self) -> int:
        """Tokens, the pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def outputs(self) -> int:
        """Output tokens known so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return self.length - self.computed

    @property
    def rank(self) -> tuple[int, bool, float]:
        """The order in which sequences are served: class, then those that ran before, here or in another group, then
        as they came: whose turn it is among tenants and ages was decided where they waited."""
        ran = bool(self.preemptions or self.request.attempt)
        return (self.request.priority, not ran, self.arrived)

    @property
    def generates(self) -> bool:
        """Whether it is here for output, not only to fill the cache."""
        return self.request.sampling.max_tokens > 0

    @property
    def wants_more(self) -> bool:
        """Whether more is to be computed once the pending tokens are known: another may be drawn, or none ever is."""
        return self.finish is None and (self.length < self.request.longest or not self.generates)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found out."""
        return self.scores_prompt and self.scored < len(self.request.prompt) - 1

    @property
    def findable(self) -> list[int]:
        """Its tokens, as far as what others have computed of them will do: no further than their logits are needed."""
        return self.tokens[: self.scored + 1] if self.unscored else self.tokens

    def draw(self) -> Draw:
        """How its next token is drawn, once the pending ones are known."""
        sampling = self.request.sampling
        draw, penalties = sampling.draw(self.length), sampling.penalties
        if penalties is None:
            return draw
        prompt = self.request.prompt
        output: tuple[int, ...] = ()
        if penalties.look_back:
            output = (*self.tokens[len(prompt) :], *([PENDING] * self.pending))
        if penalties.repetition != 1.0 and not self.distinct:
            self.distinct = tuple(dict.fromkeys(prompt))
        banned = tuple(sampling.stop_ids) if self.length - len(prompt) < penalties.min_tokens else ()
        return replace(draw, bend=Bend(penalties, self.distinct, output, banned))

    def score(self, start: int, stop: int) -> Score | None:
        """What a row that computes positions [start, stop) has to find out about the prompt."""
        if not self.unscored:
            return None
        prompt, top = self.request.prompt, self.request.sampling.prompt_logprobs
        first, last = max(start, self.scored), min(stop, len(prompt) - 1)
        return Score(first, prompt[first + 1 : last + 1], top or 0) if first < last else None

    def take_scores(self, first: int, scores: Logprobs) -> None:
        """`scores` of the tokens that follow positions first, first + 1, …; what is known already stays as it is."""
        assert first <= self.scored, f"scores from {first} on, known are {self.scored}"
        new = scores.since(self.scored - first)
        if len(new):
            self.scores.append(new)
            self.scored += len(new)

    def end_after(self, token: int) -> Finish | None:
        """Why `token`, which has just been appended, is the last one; None when it is not."""
        if token in self.request.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.request.longest else None

    def event(
        self,
        *tokens: int,
        finish: Finish | None = None,
        error: str | None = None,
        logprobs: Logprobs | None = None,
        prompt: Logprobs | None = None,
    ) -> TokenEvent:
        """News of this sequence: `tokens` are its latest."""
        request, index = self.request, self.outputs - len(tokens)
        return TokenEvent(request.id, request.attempt, index, tokens, finish, self.cached, error, logprobs, prompt)

    def hand_over_scores(self) -> Logprobs | None:
        """The prompt's log-probabilities, for the first event with output (or without any, at the end)."""
        if not self.scores_prompt:
            return None
        nothing = Logprobs(self.request.sampling.prompt_logprobs or 0)
        scores, self.scores = self.scores, []
        return join(scores) if scores else nothing
