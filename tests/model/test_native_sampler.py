"""NativeSampler: the tokens that workers.sampler draws, whatever the mix, the processor and the number of threads."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from workers.native.library import Library, load_library
from workers.native.processor import Processor
from workers.native.sampling import NativeSampler
from workers.plan import Draw
from workers.sampler import sample

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=[variant.name for variant in Processor.read().variants])
def library(request: pytest.FixtureRequest) -> Library:
    return load_library(variant=request.param)


@pytest.fixture
def sampler(library: Library) -> NativeSampler:
    return NativeSampler(library)


@pytest.fixture
def threads(library: Library) -> Iterator[Library]:
    before = library.threads
    yield library
    library.threads = before


def logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def mixed_draws(count: int, seed: int = 1) -> list[Draw]:
    chooser = random.Random(seed)
    return [
        Draw(
            temperature=chooser.choice([0.0, 1e-4, 0.3, 0.7, 1.0, 1.8, 40.0]),
            top_k=chooser.choice([0, 1, 2, 5, 40, 1500, 5000]),
            top_p=chooser.choice([1.0, 0.999, 0.9, 0.4, 1e-9]),
            min_p=chooser.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
            seed=chooser.randrange(-(2**63), 2**64),
            position=chooser.randrange(10_000),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("spread", [0.02, 3.0, 30.0])
@pytest.mark.parametrize("vocabulary", [1, 15, 101, 256, 257, 5000, 49_152])
def test_every_mix_draws_what_plain_torch_draws(sampler: NativeSampler, vocabulary: int, spread: float) -> None:
    count = 25 if vocabulary > 5000 else 150
    values, draws = logits(count, vocabulary, vocabulary, spread), mixed_draws(count, vocabulary)
    same = sum(a == b for a, b in zip(sampler(values, draws), sample(values, draws), strict=True))
    # A point within rounding of a boundary may fall to the neighbour.
    assert same >= count - 1


@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_tokens_that_tie_at_a_cut_all_stay(sampler: NativeSampler, distinct: int) -> None:
    values = torch.randint(0, distinct, (400, 900), generator=torch.Generator().manual_seed(3)).float()
    draws = mixed_draws(400, distinct)
    same = sum(a == b for a, b in zip(sampler(values, draws), sample(values, draws), strict=True))
    assert same >= 399


def test_greedy_takes_the_lowest_of_equal_logits(sampler: NativeSampler) -> None:
    values = torch.zeros(4, 100_003)
    values[0, [70_000, 31, 100_002]] = 5.0
    values[1, [99_998, 99_999]] = 1.0
    values[2] = -1.0
    values[2, 100_002] = -0.5
    assert sampler(values, [Draw()] * 4) == (31, 99_998, 100_002, 0)


def test_a_token_that_is_ruled_out_is_never_drawn_and_nothing_leaves_the_vocabulary(sampler: NativeSampler) -> None:
    values = logits(300, 1000)
    allowed = set(range(3, 1000, 41))
    values[:, [token for token in range(1000) if token not in allowed]] = -math.inf
    assert set(sampler(values, mixed_draws(300))) <= allowed
    broken = torch.full((4, 70), math.nan)
    broken[1], broken[2] = -math.inf, math.inf
    broken[3, 60] = 1.0
    for draw in (Draw(), Draw(temperature=1.0), Draw(temperature=1.0, top_p=0.5, top_k=3)):
        tokens = sampler(broken, [draw] * 4)
        assert all(0 <= token < 70 for token in tokens)
        assert tokens[3] == 60


def test_a_row_does_not_depend_on_its_neighbours_the_threads_or_where_it_lies(
    sampler: NativeSampler, threads: Library
) -> None:
    values, draws = logits(40, 3001), mixed_draws(40)
    together = sampler(values, draws)
    alone = tuple(sampler(values[row : row + 1], [draws[row]])[0] for row in range(40))
    wide = torch.full((40, 3050), 99.0)
    wide[:, 7:3008] = values
    assert alone == sampler(wide[:, 7:3008], draws) == together
    for count in (1, 2, 5):
        threads.threads = count
        assert sampler(values, draws) == NativeSampler(threads)(values, draws) == together


def test_no_row_gives_no_token_and_what_does_not_fit_is_refused(sampler: NativeSampler) -> None:
    assert sampler(torch.zeros(0, 5), []) == ()
    for values, count in (
        (torch.zeros(2, 5), 1),
        (torch.zeros(2, 5).double(), 2),
        (torch.zeros(5, 2).t(), 2),
        (torch.zeros(2, 0), 2),
    ):
        with pytest.raises(ValueError):
            sampler(values, [Draw()] * count)
