"""Means, standard errors and verdicts about a KV precision."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from deploy.quality.figures import BLOCK, Cost, Estimate, Limits, common, parted


def test_errors_of_independent_values_do_not_depend_on_blocks() -> None:
    rng = random.Random(1)
    values = [rng.gauss(3, 2) for _ in range(64 * BLOCK)]
    blocked = Estimate.blocked(values)
    assert blocked.mean == pytest.approx(statistics.fmean(values))
    assert blocked.error == pytest.approx(Estimate.of(values).error, rel=0.3)


def test_neighbours_that_agree_make_the_error_larger() -> None:
    rng = random.Random(2)
    values = [level for _ in range(64) for level in [rng.gauss(0, 1)] * BLOCK]
    assert Estimate.blocked(values).error == pytest.approx(Estimate.of(values).error * math.sqrt(BLOCK), rel=0.1)


@pytest.mark.parametrize("count", [2, 3, BLOCK, 2 * BLOCK + 1, 5 * BLOCK - 1])
def test_every_value_lies_in_one_block(count: int) -> None:
    found = Estimate.blocked([float(value) for value in range(count)])
    assert found.mean == pytest.approx((count - 1) / 2)
    assert found.error > 0


def test_a_cost_is_paired_and_relative() -> None:
    before = [1.0, 5.0] * BLOCK
    after = [value + 0.1 for value in before]
    found = Cost.of([0.25] * len(before), [True, True, False, True] * (len(before) // 4), before, after)
    assert found.perplexity == pytest.approx(math.exp(3.1))
    assert found.rise.mean == pytest.approx(math.exp(0.1) - 1)
    assert found.rise.error == pytest.approx(0, abs=1e-9), "what makes a token hard with both caches is no part of it"
    assert (found.kl.mean, found.top1.mean, found.tokens) == (0.25, 0.75, 2 * BLOCK)
    assert Cost.parse(json.loads(json.dumps(found.plain))) == found


def cost(kl: float = 0.0, top1: float = 1.0, rise: float = 0.0) -> Cost:
    return Cost(Estimate(kl, 0.0), Estimate(top1, 0.0), 30.0, Estimate(rise, 0.0), 1023)


@pytest.mark.parametrize("worst", [math.nan, math.inf, 900.0])
def test_nonsense_gets_a_verdict(worst: float) -> None:
    count = 2 * BLOCK
    found = Cost.of([worst] * count, [False] * count, [1.0] * count, [worst] * count)
    assert len(Limits().faults(found)) == 3


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (cost(), []),
        (cost(0.02, 0.9, 0.03), []),
        (cost(kl=0.021), ["KL 0.0210 is above max_kl 0.02"]),
        (cost(top1=0.89), ["top-1 agreement 0.890 is below min_top1 0.9"]),
        (cost(rise=0.09), ["perplexity rises by 9.0%, above max_perplexity_rise 0.03"]),
        (cost(kl=math.nan), ["KL nan is above max_kl 0.02"]),
    ],
)
def test_limits_name_what_is_beyond_them(found: Cost, says: list[str]) -> None:
    assert Limits().faults(found) == says


def test_all_faults_are_said_at_once() -> None:
    assert len(Limits().faults(cost(1.0, 0.1, 1.0))) == 3


def test_continuations_part_at_the_first_other_token() -> None:
    assert [common(*pair) for pair in (([1, 2, 3], [1, 2, 4]), ([1, 2], [1, 2]), ([5], [6]), ([], [1]))] == [2, 2, 0, 0]
    assert parted([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]]) == Estimate(2.0, 1.0)
