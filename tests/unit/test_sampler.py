"""sample(): the filters against a plain rewrite, draws against their distribution, and what must not matter."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from workers.plan import Draw
from workers.sampler import sample, uniform


def logits(rows: int, vocabulary: int = 50, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def plain(row: list[float], draw: Draw) -> int:
    """One row's draw, written out: sort, cut, then walk the vocabulary."""
    peak = max(row)
    weights = [math.exp((value - peak) / draw.temperature) for value in row]
    order = sorted(range(len(row)), key=lambda token: -weights[token])
    kept = order[: draw.top_k] if draw.top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass >= draw.top_p * total and nucleus:
            break
        nucleus.append(token)
        mass += weights[token]
    allowed = sorted(token for token in nucleus if weights[token] >= draw.min_p)
    point = uniform(draw.seed, draw.position) * sum(weights[token] for token in allowed)
    for token in allowed:
        point -= weights[token]
        if point < 0:
            return token
    return allowed[-1]


def test_every_mix_of_filters_draws_what_the_plain_rewrite_draws() -> None:
    chooser = random.Random(1)
    values = logits(400, vocabulary=2000, spread=3.0)
    draws = [
        Draw(
            temperature=chooser.choice([0.3, 0.7, 1.0, 1.8]),
            top_k=chooser.choice([0, 2, 5, 40, 1500, 5000]),
            top_p=chooser.choice([1.0, 0.999, 0.9, 0.4]),
            min_p=chooser.choice([0.0, 0.0, 0.02, 0.3]),
            seed=chooser.randrange(2**64),
            position=chooser.randrange(10_000),
        )
        for _ in range(400)
    ]
    expected = [plain(row, draw) for row, draw in zip(values.tolist(), draws, strict=True)]
    same = sum(a == b for a, b in zip(sample(values, draws), expected, strict=True))
    # A point within rounding of a boundary may fall to the neighbour.
    assert same >= 398


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    values = torch.zeros(3, 100_000)
    values[0, [70_000, 31, 99_999]] = 5.0
    values[1, [99_998, 99_999]] = 1.0
    assert sample(values, [Draw()] * 3) == (31, 99_998, 0)


@pytest.mark.parametrize(
    "draw",
    [
        Draw(temperature=1e-30),
        Draw(temperature=1e-300),
        Draw(temperature=1.0, top_p=1e-9),
        Draw(temperature=2.0, top_k=1),
        Draw(temperature=1.0, min_p=1.0),
    ],
)
def test_extreme_settings_are_greedy(draw: Draw) -> None:
    values = logits(20, spread=8.0)
    values[3, [4, 9]] = 60.0
    values[4] = 1e30 * values[4]
    greedy = tuple(values.argmax(-1).tolist())
    assert sample(values, [draw] * 20) == greedy
    assert greedy[3] == 4


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 50.0, 1e6])
def test_no_temperature_leaves_the_vocabulary_or_breaks(temperature: float) -> None:
    values = logits(30, spread=100.0)
    draws = [Draw(temperature=temperature, top_p=0.9, seed=seed, position=seed) for seed in range(30)]
    tokens = sample(values, draws)
    assert all(0 <= token < 50 for token in tokens)
    if temperature < 1e-3:
        assert tokens == tuple(values.argmax(-1).tolist())


def test_a_draw_depends_on_its_own_row_seed_and_position_only() -> None:
    values = logits(16)
    draws = [Draw(temperature=1.0, top_p=0.95 if row % 2 else 1.0, seed=row, position=7 * row) for row in range(16)]
    draws[5] = Draw()
    together = sample(values, draws)
    assert together == tuple(sample(values[row : row + 1], [draws[row]])[0] for row in range(16))
    turned = sample(values.flip(0), draws[::-1])
    assert turned == together[::-1]


def test_tiny_differences_in_logits_rarely_change_a_token() -> None:
    values = logits(2000, vocabulary=300)
    draws = [Draw(temperature=1.0, top_k=50, seed=row, position=row) for row in range(2000)]
    noise = 1e-6 * logits(2000, vocabulary=300, seed=5)
    changed = sum(a != b for a, b in zip(sample(values, draws), sample(values + noise, draws), strict=True))
    assert changed <= 2


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[2.0, 0.0, 1.0, -1.0, 0.5]])
    count = 40_000
    tokens = sample(row.expand(count, -1), [Draw(temperature=1.0, seed=9, position=place) for place in range(count)])
    seen = Counter(tokens)
    for token, share in enumerate(row.softmax(-1)[0].tolist()):
        assert abs(seen[token] / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_uniforms_are_spread_and_tell_seeds_and_positions_apart() -> None:
    values = {uniform(seed, position) for seed in (0, 1, 2**63, -1) for position in range(5000)}
    assert len(values) > 19_900
    assert all(0 <= value < 1 for value in values)
    for seed in (0, 1):
        assert abs(sum(uniform(seed, position) for position in range(5000)) / 5000 - 0.5) < 0.02
    assert uniform(3, 5) != uniform(5, 3)
    # Pinned: a change would change what a seed draws after an update.
    assert [round(uniform(42, position), 6) for position in range(3)] == [0.343292, 0.955747, 0.48635]


def test_an_infinite_mask_is_never_drawn() -> None:
    values = logits(200)
    values[:, 10:] = float("-inf")
    tokens = sample(values, [Draw(temperature=3.0, seed=seed, position=1) for seed in range(200)])
    assert max(tokens) < 10
    assert len(set(tokens)) > 5


@pytest.mark.parametrize("tied", [5, 64, 100, 1500, 20_000])
def test_tokens_tied_at_a_cut_all_stay(tied: int) -> None:
    values = torch.full((1, 30_000), -5.0)
    values[0, :tied] = 1.0
    draws = [Draw(temperature=0.5, top_k=3, seed=seed, position=2) for seed in range(300)]
    tokens = sample(values.expand(300, -1), draws)
    assert max(tokens) < tied
    assert max(tokens) > tied * 0.7
    assert min(tokens) < tied * 0.3
