"""The budget of a step after a shortage of memory."""

from __future__ import annotations

import pytest

from workers.budget import GOOD_STEPS, Budget


def test_nothing_is_held_back_before_the_first_shortage() -> None:
    budget = Budget()
    budget.good(64, 512)
    assert budget.allow(64, 512) == (64, 512) and not budget.reduced


@pytest.mark.parametrize("size", [(64, 512), (3, 40), (1, 7), (2, 2)])
def test_each_shortage_halves_what_was_tried_down_to_one_token(size: tuple[int, int]) -> None:
    budget = Budget()
    tries = 0
    while (now := budget.allow(*size)) != (1, 1):
        budget.short(*now)
        assert budget.allow(*size) == (max(1, now[0] // 2), max(1, now[1] // 2))
        tries += 1
        assert tries < 12
    budget.short(1, 1)
    assert budget.allow(*size) == (1, 1)


def test_it_recovers_by_an_eighth_after_every_thirty_two_good_steps() -> None:
    budget = Budget()
    budget.short(64, 512)
    for _ in range(GOOD_STEPS - 1):
        budget.good(64, 512)
    assert budget.allow(64, 512) == (32, 256)
    budget.good(64, 512)
    assert budget.allow(64, 512) == (40, 320)
    for _ in range(3 * GOOD_STEPS):
        budget.good(64, 512)
    assert budget.allow(64, 512) == (64, 512) and not budget.reduced


def test_a_shortage_on_the_way_up_begins_the_wait_anew() -> None:
    budget = Budget()
    budget.short(8, 80)
    for _ in range(GOOD_STEPS - 1):
        budget.good(8, 80)
    budget.short(4, 40)
    budget.good(8, 80)
    assert budget.allow(8, 80) == (2, 20)


def test_lower_limits_stay_in_force() -> None:
    budget = Budget()
    budget.short(64, 512)
    assert budget.allow(16, 100) == (16, 100)
