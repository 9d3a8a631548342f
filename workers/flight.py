"""A step in flight: who takes part in it, and how to take that back when the ranks drop it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.table import BlockTable
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's part in a step: its table then, the tokens in place before and afterwards, whether it samples one
    more, and how far it had ever got before."""

    sequence: Sequence
    table: BlockTable
    start: int
    computed: int
    sampled: bool
    reached: int

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

    def undo(self) -> None:
        for part in self.parts:
            part.undo()
        self.undone = True
