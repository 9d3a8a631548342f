"""A step in flight: who takes part in it, and how to take that back when the ranks drop it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from kvstore.table import BlockTable
from workers.logprobs import Logprobs
from workers.plan import StepResult
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's part in a step: its table then, the tokens in place before and afterwards, whether it samples one
    more, how far it had ever got before, and from which position on it scores its prompt, if it does."""

    sequence: Sequence
    table: BlockTable
    start: int
    computed: int
    sampled: bool
    reached: int
    scored: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the sequence still has the table of then: it was not preempted since."""
        return self.sequence.table is self.table

    def undo(self) -> None:
        """As if it had never been planned; what was planned on top of it must have been undone before."""
        if self.sampled:
            self.sequence.pending -= 1
        if self.holds:
            self.sequence.computed = self.start
            self.sequence.reached = self.reached


@dataclass(slots=True)
class Flight:
    """Plan `step`, which computes `computed` tokens, `recomputed` of them not for the first time. `undone`: it was
    taken back, because it, or one before it, was dropped."""

    step: int
    parts: list[Part]
    computed: int
    recomputed: int
    undone: bool = False

    def outcomes(self, result: StepResult) -> Iterator[tuple[Part, int | None, Logprobs | None]]:
        """Each part whose sequence has not ended, its sampled token, and that one's log-probabilities. What was found
        out about prompts is with their sequences by then."""
        tokens, scores = iter(result.tokens), iter(result.scores)
        logprobs = iter(result.logprobs) if result.logprobs else repeat(None)
        for part in self.parts:
            token, logprob = (next(tokens), next(logprobs)) if part.sampled else (None, None)
            score = None if part.scored is None else next(scores)
            if part.sequence.finish is not None:
                continue
            if part.scored is not None and score is not None:
                part.sequence.take_scores(part.scored, score)
            yield part, token, logprob

    def undo(self) -> None:
        for part in self.parts:
            part.undo()
        self.undone = True
