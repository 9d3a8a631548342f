"""What a step asks for before it runs: more rows, tokens or context never ask for less."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from workers.demand import Demand
from workers.models.shapes import LatentShape
from workers.plan import Draw, Row, Score, StepPlan

DEMAND = Demand(
    hidden=576,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    inner=1536,
    vocabulary=49_152,
    item=2,
    slot=2 * 64 * 2,
    decodes=True,
    gather_slots=32_768,
    tile=256,
    block=128,
    windows=(None,),
)


def plan(*rows: tuple[int, int, bool]) -> StepPlan:
    """Rows of (tokens, start, whether one is sampled)."""
    return StepPlan(
        1, tuple(Row((3,) * count, start, ((0,),), Draw() if draw else None) for count, start, draw in rows)
    )


def asked(step: StepPlan, demand: Demand = DEMAND) -> int:
    return sum(demand.buffers(step))


def test_a_step_without_rows_asks_for_nothing() -> None:
    assert DEMAND.buffers(StepPlan(1, copy=((1, 2),), zero=(3,))) == ()


def test_a_chunk_of_a_prompt_by_hand() -> None:
    token = 2 * (2 + 4) * 576 + max(3 * 2 * 1536, 64 * (2 * (9 + 6) + 6 * 9))
    index = 512 * 3 * 8
    gather = 256 * 2 * 3 * 64 * (2 + 4)
    scores = 4 * 9 * (128 * 256 + 2 * 512 * 64)
    assert DEMAND.buffers(plan((512, 0, False))) == (512 * token, index, gather, scores)
    assert DEMAND.buffers(plan((512, 512, False))) == (512 * token, 2 * index, gather, scores)


def test_latents_by_hand() -> None:
    kept = LatentShape(512, 64, 128, 128, None, interleaved=True)
    demand = replace(DEMAND, kv_heads=1, slot=1152, head_dim=192, latent=kept, inner=100, expert=2000)
    token = 2 * (2 + 4) * 576 + max(2 * (9 * 320 + 576), (2 + 4) * 576 + 3 * 2 * 2000)
    slot = 1152 + 4 * 576
    rows = plan((1, 99, False), (1, 49, False))
    absorbed = 4 * 9 * (150 + 2 * (2 * 576 + 512))
    assert demand.buffers(rows) == (2 * token, 150 * 8, 150 * slot, absorbed)
    short = 4 * 9 * (64 * 164 + 64 * (2 * 576 + 512))
    assert demand.buffers(plan((64, 100, False))) == (64 * token, 164 * 8, 164 * slot, short)
    expanded = 4 * 9 * (128 * 256 + 512 * (2 * 192 + 128) + 256 * (2 * 256 + 192))
    assert demand.buffers(plan((512, 0, False))) == (512 * token, 512 * 8, 256 * slot, expanded)


def test_logits_come_when_attention_is_done() -> None:
    few = plan(*((1, 10, True) for _ in range(8)))
    assert DEMAND.buffers(few)[1:] == (8 * 49_152 * 16,)
    many = plan(*((1, 8000, True) for _ in range(8)))
    assert sum(DEMAND.buffers(many)[1:]) > 8 * 49_152 * 16
    assert len(DEMAND.buffers(many)) == 4


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("windows", [(None,), (None, 700)])
def test_more_work_never_asks_for_less(seed: int, windows: tuple[int | None, ...]) -> None:
    dice = random.Random(seed)
    demand = replace(DEMAND, windows=windows, slot=dice.choice([256, 512]), gather_slots=dice.choice([64, 4096]))
    rows = [
        (dice.choice([1, 1, 1, 40]), dice.randrange(0, 3000), dice.random() < 0.7) for _ in range(dice.randrange(1, 9))
    ]
    before = asked(plan(*rows), demand)
    at = dice.randrange(len(rows))
    count, start, draw = rows[at]
    longer = [*rows[:at], (count, start + 64, draw), *rows[at + 1 :]]
    assert asked(plan(*longer), demand) >= before
    assert asked(plan(*rows, (1, 5, True)), demand) > before
    assert asked(plan(*rows, (30, 100, False)), demand) > before


def test_one_gather_is_bounded_however_many_rows_there_are() -> None:
    narrow = replace(DEMAND, gather_slots=1000, vocabulary=1)
    ten, hundred = (narrow.buffers(plan(*((1, 499, False) for _ in range(rows)))) for rows in (10, 100))
    assert ten[2] == hundred[2] == 1000 * 2 * 3 * 64 * 6
    assert hundred[1] == 10 * ten[1], "the index names every slot"


def test_more_ranks_share_the_work_and_a_window_bounds_it() -> None:
    chunk, far = plan((512, 3584, False)), plan((512, 35840, False))
    half = replace(DEMAND, q_heads=5, kv_heads=2, inner=768)
    assert asked(chunk, half) < asked(chunk) < asked(far)
    windowed = replace(DEMAND, windows=(1024,))
    assert asked(chunk, windowed) == asked(far, windowed) < asked(chunk)


def test_scoring_a_prompt_asks_for_a_slice_of_logits_however_long_the_chunk() -> None:
    demand = replace(DEMAND, slice=32)

    def logits(tokens: int, targets: int) -> int:
        row = Row((3,) * tokens, 0, ((0,),), None, None, Score(0, (5,) * targets, 5))
        return max(demand.buffers(StepPlan(1, (row,)))[1:])

    assert logits(512, 511) == logits(512, 64) == logits(64, 32) == 32 * 49_152 * 16
    assert logits(8, 2) < logits(64, 32)
