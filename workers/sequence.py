"""A request as it enters a group, and the sequence that the scheduler makes of it. No torch, no Ray, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvstore.chain import BlockKey
from kvstore.sessions import Terms
from kvstore.store import BlockTable
from workers.plan import Draw, Finish


class Priority(IntEnum):
    """Classes, best first: an interactive request may preempt a batch one."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn and when it ends. `stop_ids` end it (the end-of-sequence ids are among them
    unless the client asked to ignore them); `seed` is always fixed by the ingress, so that a replay draws the same."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def draw(self, position: int) -> Draw:
        """The draw of the token at `position` of the sequence."""
        return Draw(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, position)


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one request. `resumed` is output that an earlier attempt already sent: it is computed again, not
    sampled again. `namespace` is the prefix cache's root (opaque bytes); `grant` names the coordinator's permission and
    `granted_blocks` what it reserved; `age` is how many seconds ago the request first arrived, `left` how many seconds
    remain until its deadline: one that has passed is never prefilled. `terms` say how long and how much of it stays
    cached. `sampling.max_tokens` 0 prefills and generates nothing."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    namespace: bytes
    attempt: int = 0
    resumed: tuple[int, ...] = ()
    priority: Priority = Priority.INTERACTIVE
    grant: str = ""
    granted_blocks: int = 0
    age: float = 0.0
    left: float | None = None
    terms: Terms = Terms()

    @property
    def longest(self) -> int:
        """Tokens of the sequence when it has generated all it may."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way.

    `tokens` are those known so far; `pending` more are being sampled by steps in flight, the last of them as sampled
    row `source` of the latest step. `computed` counts the tokens whose keys and values are in place once the launched
    steps have run, `reached` how far that ever got. `keys` is the hash chain of the tokens as far as it was needed.
    A sequence without a table waits.
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
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.resumed]

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
        """The order in which sequences are served: class, then those that ran before, then arrival."""
        return (self.request.priority, not self.preemptions, self.arrived)

    @property
    def wants_more(self) -> bool:
        """Whether one more token may be drawn once the pending ones are known."""
        return self.finish is None and self.length < self.request.longest
