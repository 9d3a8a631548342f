"""What moves between a group's scheduler and its ranks: plans down, results up; and the reports that leave the group.

Plain frozen values: no tensor, no Ray handle, no clock. A plan names everything a rank needs for one step, so that
ranks hold weights and KV shards and no sequence state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from kvstore.message import message
from kvstore.store import PoolReport
from workers.logprobs import Logprobs

PENDING = -1
"""In `Row.tokens`: the token that the step before this one is still sampling for `Row.source`."""


class Finish(Enum):
    """Why a sequence ended: the values are OpenAI's `finish_reason` where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a client wants more or less of, in logits: `presence` and `frequency` are taken off tokens of the output,
    `repetition` divides (negative ones: multiplies) those of prompt and output, `bias` is added to some ids. Before
    `min_tokens` tokens of output none ends the sequence."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def look_back(self) -> bool:
        """Whether it matters which tokens have come so far."""
        return bool(self.presence or self.frequency) or self.repetition != 1.0


@dataclass(frozen=True, slots=True)
class Bend:
    """What is done to a row's logits before its token is drawn. `prompt` are the distinct ids of the prompt, as far as
    they matter, `output` all tokens generated so far, likewise (the last may be PENDING); `banned` ones do not come."""

    penalties: Penalties
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's next token is drawn. A draw is a function of (seed, position) and the row's logits only.

    `temperature` 0 is greedy (lowest id among ties); `top_k` 0, `top_p` 1 and `min_p` 0 are off. `position` is the
    index in the sequence of the token that is drawn. `top`: its log-probability is wanted, and those of so many
    likeliest tokens; None: nothing of the kind. What `bend` does to the logits does not show in these.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    top: int | None = None
    bend: Bend | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities that are wanted of tokens that are known: `targets` follow the tokens at positions first,
    first + 1, … of a row; and at each place those of the `top` likeliest."""

    first: int
    targets: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: compute `tokens` at positions start, start + 1, ….

    `tables`: per layer group, the block ids that cover positions [0, start + len(tokens)). `tokens` is (PENDING,) when
    the token comes from row `source` of the step before (`source` indexes that step's sampled rows). `draw` is None for
    a chunk whose logits nobody needs; a `score` asks for those of its own tokens.
    """

    tokens: tuple[int, ...]
    start: int
    tables: tuple[tuple[int, ...], ...]
    draw: Draw | None = None
    source: int | None = None
    score: Score | None = None

    def filled(self, token: int) -> Row:
        """The same with `token` in the place of the pending one."""
        draw = self.draw
        if draw is not None and draw.bend is not None and draw.bend.output[-1:] == (PENDING,):
            draw = replace(draw, bend=replace(draw.bend, output=(*draw.bend.output[:-1], token)))
        return replace(self, tokens=(token,), draw=draw)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for every rank of the group. A rank copies, then zeroes, then writes.

    `copy` holds (source, destination) block pairs, `zero` blocks to clear; both name blocks in all layer groups alike.
    A plan without rows is housekeeping (or keeps the collectives awake). `drops` is how many dropped steps the planner
    knew of: a rank that has dropped more drops this plan too, because it builds on one that never ran.
    """

    step: int
    rows: tuple[Row, ...] = ()
    copy: tuple[tuple[int, int], ...] = ()
    zero: tuple[int, ...] = ()
    drops: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What rank 0 gives back: the sampled token of each row that has a draw, in the plan's order; seconds it took.

    `logprobs`: for each of these tokens, where its draw asks for them; () when none does. `scores`: for each row with a
    score, in the plan's order.
    `dropped`: a rank had no memory for the step, so that no rank computed a row (`tokens` is empty); what the plan
    copies and zeroes was done. `short`: it is this step that found no memory; others
    are dropped because they built on it.
    """

    step: int
    tokens: tuple[int, ...]
    seconds: float = 0.0
    dropped: bool = False
    short: bool = False
    logprobs: tuple[Logprobs | None, ...] = ()
    scores: tuple[Logprobs, ...] = ()


@message
@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one request. `index` counts output tokens from its start, `resumed` ones included. After Finish.STOP the
    last token is the stop token: generated and counted, but no part of the text.

    `tokens` are new output tokens [index, index + len(tokens)); `finish` is set on the last event only. `cached` is the
    number of prompt tokens that came from the prefix cache, known from the first event on. Where the request asks for
    them, `logprobs` are those of `tokens`, and `prompt` those of the prompt from its second token on, with the first
    event of a request whose output begins here.
    """

    request: str
    attempt: int
    index: int
    tokens: tuple[int, ...]
    finish: Finish | None = None
    cached: int = 0
    error: str | None = None
    logprobs: Logprobs | None = None
    prompt: Logprobs | None = None


@message
@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps with up to `rows` sequences (a power of two): how many, their seconds, sampled tokens and computed tokens,
    since the group came up."""

    rows: int
    steps: int
    seconds: float
    sampled: int
    computed: int


@message
@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a group tells the coordinator, now and then. Times are durations in seconds, never clock readings.

    `committed` is a forecast: the most blocks that the live requests will hold at one time if each generates what it
    was granted (see workers.forecast); `accepted` are the grant ids taken since the last report;
    `live` are those whose request has not ended (None: not told), `voided` those that it was told are void;
    `sessions` holds (namespace, cached blocks, seconds until they expire) of those that changed since the last report,
    0 blocks for one that is gone; in a `full` report, of all. Counters run from the group's start: `ooms` dropped
    steps, `evicted` and `expired` blocks, `expired_asked` prompt tokens that would have hit had they not expired,
    `lost_to_scope` those that another namespace had cached. `unused_slots` are token slots of held blocks that hold no
    token, `latest` the longest step in seconds since the report before; `request_blocks[i]` counts ended requests whose
    most blocks at a time lay in [2**i, 2**(i+1)); `revision` is that of the live settings in force (0: as built).
    """

    group: str
    epoch: int
    sequence: int
    step: int
    pool: PoolReport
    committed: int
    running: int
    waiting: int
    waiting_tokens: int
    accepted: tuple[str, ...] = ()
    voided: tuple[str, ...] = ()
    live: tuple[str, ...] | None = None
    full: bool = False
    sessions: tuple[tuple[bytes, int, float], ...] = ()
    preemptions: int = 0
    finished: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    leaked: int = 0
    ooms: int = 0
    evicted: int = 0
    expired: int = 0
    expired_asked: int = 0
    lost_to_scope: int = 0
    unused_slots: int = 0
    latest: float = 0.0
    steps: tuple[StepRow, ...] = ()
    request_blocks: tuple[int, ...] = ()
    revision: int = 0


@message
@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold: sequences, tokens, and tokens of one prefill chunk. `refill` False: slots that finish stay
    empty (a lone request still starts, and what was preempted comes back). `trim`: purge expired blocks at once and
    spend no memory on speculation."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk: int
    refill: bool = True
    trim: bool = False

    def within(self, most: Limits) -> Limits:
        """These, as far as they do not exceed `most` (and let anything through at all)."""
        seqs, tokens, chunk = (
            max(1, min(asked, own))
            for asked, own in (
                (self.max_num_seqs, most.max_num_seqs),
                (self.max_num_batched_tokens, most.max_num_batched_tokens),
                (self.chunk, most.chunk),
            )
        )
        return Limits(seqs, tokens, chunk, self.refill, self.trim)


class Group(Protocol):
    """The ranks as an engine sees them: launch a plan, wait for its result; plans run in the order launched."""

    def launch(self, plan: StepPlan) -> object:
        """Hand `plan` to every rank and return a handle at once."""
        ...

    def wait(self, handle: object) -> StepResult:
        """Block until the plan behind `handle` has run. Raises GroupDead when a rank is gone."""
        ...


class GroupDead(Exception):
    """A rank is gone or a step failed after its collectives began: the group must be rebuilt."""
