"""Batcher: a plan's tokens, positions and slots against a plain rewrite, in memory that later steps use again."""

from __future__ import annotations

import random

import pytest
import torch

from workers.batch import Batch, Batcher, build_batch
from workers.plan import Draw, Row, StepPlan

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
SIZE = 4


def plans(count: int, seed: int = 0) -> list[StepPlan]:
    """Decodes, chunks and both, with and without draws."""
    dice = random.Random(seed)
    made = []
    for step in range(count):
        rows = []
        for number in range(dice.randrange(1, 9)):
            start, tokens = dice.randrange(50), dice.choice([1, 1, 1, 2, dice.randrange(3, 40)])
            table = tuple(dice.sample(range(1000), -(-(start + tokens) // SIZE)))
            draw = Draw(seed=number, position=start + tokens) if dice.random() < 0.8 else None
            rows.append(Row(tuple(dice.choices(range(5000), k=tokens)), start, (table,), draw))
        made.append(StepPlan(step, tuple(rows)))
    return made


def check(batch: Batch, plan: StepPlan) -> None:
    tokens = [token for row in plan.rows for token in row.tokens]
    places = [(row, row.start + index) for row in plan.rows for index in range(len(row.tokens))]
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.slots(0).tolist() == [row.tables[0][at // SIZE] * SIZE + at % SIZE for row, at in places]
    assert batch.draws == tuple(row.draw for row in plan.rows if row.draw)
    assert len(batch.sampled) == len(batch.draws)
    for place, draw in zip(batch.sampled.tolist(), batch.draws, strict=True):
        assert batch.positions[place] == draw.position - 1
    for span, row in zip(batch.spans, plan.rows, strict=True):
        assert (span.count, span.start, span.tables) == (len(row.tokens), row.start, row.tables)
        assert tokens[span.first : span.first + span.count] == list(row.tokens)
        assert span.length == row.start + len(row.tokens)


def test_any_plan_becomes_what_it_says() -> None:
    batcher = Batcher(SIZE, CPU)
    for plan in plans(60):
        check(batcher.build(plan), plan)
        check(build_batch(plan, SIZE, CPU), plan)


def test_steps_of_the_same_size_use_the_same_memory() -> None:
    batcher, steps = Batcher(SIZE, CPU), plans(30, seed=1)
    largest = max(steps, key=lambda plan: plan.tokens)
    places = {batcher.build(largest).tokens.data_ptr()} | {batcher.build(plan).tokens.data_ptr() for plan in steps}
    assert len(places) == 1


def test_a_row_beyond_its_blocks_is_an_error() -> None:
    plan = StepPlan(0, (Row((3,), 8, ((5, 6),), None),))
    with pytest.raises(IndexError):
        _ = Batcher(SIZE, CPU).build(plan).slots(0)
