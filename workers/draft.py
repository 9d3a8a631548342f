"""A plan under construction: rows, the sequences behind them, and what is left of the token budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.store import BlockTable, Copy
from workers.plan import PENDING, Limits, Row, StepPlan
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's part in a step: its table then, the tokens in place afterwards, whether it samples one more."""

    sequence: Sequence
    table: BlockTable
    computed: int
    sampled: bool


@dataclass(slots=True)
class Draft:
    """One step being planned under `limits`; `block_size` tokens a block."""

    limits: Limits
    block_size: int
    budget: int = 0
    recomputed: int = 0
    rows: list[Row] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    copy: list[Copy] = field(default_factory=list)
    _planned: set[int] = field(default_factory=set)
    _sampled: int = 0

    def __post_init__(self) -> None:
        self.budget = self.limits.max_num_batched_tokens

    def __contains__(self, sequence: Sequence) -> bool:
        return id(sequence) in self._planned

    @property
    def computed(self) -> int:
        """Tokens that the step computes."""
        return self.limits.max_num_batched_tokens - self.budget

    def add(self, sequence: Sequence, table: BlockTable) -> None:
        """A row for as much of what `sequence` has to compute as budget and chunk allow; its blocks are there."""
        count = min(sequence.todo, self.budget, self.limits.chunk if sequence.todo > 1 else 1)
        start, stop = sequence.computed, sequence.computed + count
        assert count > 0, "a row must compute something"
        draws = stop == sequence.length
        tokens, source = tuple(sequence.tokens[start:stop]), None
        if stop > len(sequence.tokens):
            tokens, source = (*tokens, PENDING), sequence.source
        blocks = -(-stop // self.block_size)
        tables = tuple(tuple(group[:blocks]) for group in table.blocks)
        draw = sequence.request.sampling.draw(sequence.length) if draws else None
        self.rows.append(Row(tokens, start, tables, draw, source))
        self.parts.append(Part(sequence, table, stop, draws))
        self._planned.add(id(sequence))
        self.budget -= count
        self.recomputed += max(0, min(stop, sequence.reached) - start)
        sequence.computed = stop
        sequence.reached = max(sequence.reached, stop)
        if draws:
            sequence.source = self._sampled
            sequence.pending += 1
            self._sampled += 1

    def finish(self, step: int, zero: tuple[int, ...]) -> StepPlan:
        """The plan, as the ranks get it."""
        return StepPlan(step, tuple(self.rows), tuple(self.copy), zero)
