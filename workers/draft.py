"""A plan under construction: rows, the sequences behind them, and what is left of the token budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.store import Copy
from kvstore.table import BlockTable
from workers.flight import Part
from workers.plan import PENDING, Row, StepPlan
from workers.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """Step `step` being planned: at most `budget` more tokens in `places` more rows, `chunk` tokens of one prompt."""

    step: int
    budget: int
    places: int
    chunk: int
    block_size: int
    computed: int = 0
    recomputed: int = 0
    rows: list[Row] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    copy: list[Copy] = field(default_factory=list)
    _planned: set[int] = field(default_factory=set)
    _sampled: int = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return id(sequence) in self._planned

    @property
    def room(self) -> bool:
        """Whether another row fits."""
        return self.budget > 0 and self.places > 0

    @property
    def longest(self) -> int:
        """The most tokens that a row may have."""
        return min(self.budget, self.chunk)

    def stop(self, sequence: Sequence) -> int:
        """Up to where a row for `sequence` would compute: as much of what it has to do as budget and chunk allow."""
        return sequence.computed + min(sequence.todo, self.budget, self.chunk if sequence.todo > 1 else 1)

    def add(self, sequence: Sequence, table: BlockTable) -> None:
        """A row for `sequence`, whose blocks are there."""
        start, stop = sequence.computed, self.stop(sequence)
        count = stop - start
        assert count > 0, "a row must compute something"
        draws = stop == sequence.length and sequence.generates
        tokens, source = tuple(sequence.tokens[start:stop]), None
        if stop > len(sequence.tokens):
            tokens, source = (*tokens, PENDING), sequence.source
        blocks = -(-stop // self.block_size)
        tables = tuple(tuple(group[:blocks]) for group in table.blocks)
        draw = sequence.draw() if draws else None
        score = sequence.score(start, stop) if sequence.scores_prompt else None
        self.rows.append(Row(tokens, start, tables, draw, source, score))
        first = None if score is None else score.first
        self.parts.append(Part(sequence, table, start, stop, draws, sequence.reached, first))
        self._planned.add(id(sequence))
        sequence.stepped = self.step
        self.budget -= count
        self.places -= 1
        self.computed += count
        self.recomputed += max(0, min(stop, sequence.reached) - start)
        sequence.computed = stop
        sequence.reached = max(sequence.reached, stop)
        if draws:
            sequence.source = self._sampled
            sequence.pending += 1
            self._sampled += 1

    def finish(self, zero: tuple[int, ...], drops: int) -> StepPlan:
        """The plan, as the ranks get it; `drops` are the steps that were short of memory so far."""
        return StepPlan(self.step, tuple(self.rows), tuple(self.copy), zero, drops)
