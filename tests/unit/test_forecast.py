"""The forecast of blocks against a simulation token by token, and what it makes of grants and shared blocks."""

from __future__ import annotations

import random

import pytest

from kvstore.store import KVStore
from workers.forecast import Course, committed_blocks, expected_length, peak_blocks
from workers.sequence import Request, Sampling, Sequence


def simulate(courses: list[Course], size: int) -> int:
    """Blocks at the highest moment, by letting every sequence grow a token at a time until it ends."""
    highest = 0
    for moment in range(max((rest for rest, _, _ in courses), default=0) + 1):
        alive = [(length + moment, borrowed) for rest, length, borrowed in courses if rest >= moment]
        highest = max(highest, sum(max(0, -(-length // size) - borrowed) for length, borrowed in alive))
    return highest


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_peak_is_that_of_a_simulation(size: int) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        courses = []
        for _ in range(rng.randint(0, 12)):
            length = rng.randint(1, 60)
            courses.append((rng.choice([0, rng.randint(0, 70)]), length, rng.randint(0, length // size)))
        assert peak_blocks(courses, size) == simulate(courses, size), f"seed {seed}: {courses}"


def test_sequences_that_end_at_different_times_do_not_need_their_sum() -> None:
    alternating = [(10 * i, 100 - 10 * i, 0) for i in range(10)]
    assert peak_blocks(alternating, 1) == 550 < sum(rest + length for rest, length, _ in alternating)


@pytest.mark.parametrize(
    ("length", "outputs", "granted", "longest", "expected"),
    [
        (10, 2, 32, 100, 32),
        (10, 2, 0, 100, 100),
        (10, 2, 128, 100, 100),
        (32, 8, 32, 100, 32 + 16),
        (64, 40, 32, 100, 64 + 16),
        (600, 400, 32, 1000, 600 + 100),
        (99, 40, 32, 100, 100),
        (100, 40, 32, 100, 100),
    ],
)
def test_a_sequence_is_expected_to_reach_its_grant_or_to_outgrow_it_by_a_quarter(
    length: int, outputs: int, granted: int, longest: int, expected: int
) -> None:
    assert expected_length(length, outputs, granted, longest, 16) == expected


def sequence(prompt: int, output: int, granted: int = 0) -> Sequence:
    return Sequence(Request("r", tuple(range(prompt)), Sampling(output), b"n", granted_blocks=granted), 0.0)


def test_waiting_sequences_count_as_if_they_ran_from_now_on() -> None:
    store = KVStore(64, 4)
    assert committed_blocks([], store) == 0
    assert committed_blocks([sequence(8, 8), sequence(8, 8, granted=3)], store) == 3 + 3
    assert committed_blocks([sequence(8, 8)] * 3, store) == 12


def start(store: KVStore, seq: Sequence) -> Sequence:
    seq.table = store.adopt(b"n", seq.tokens, seq.keys, 0.0)
    assert store.grow(seq.table, seq.table.cached, seq.length, 0.0) is not None
    store.seal(seq.table, seq.tokens, seq.length, 0.0)
    seq.computed = seq.length
    store.pool.launch(1)
    store.pool.apply(1)
    return seq


def exact(sequences: list[Sequence], store: KVStore) -> int:
    """Every block by itself: held until the last of its sequences ends."""
    rests = {id(s): s.request.longest - s.length for s in sequences}
    last: dict[int, int] = {}
    for s in sequences:
        for block in s.table.blocks[0] if s.table else ():
            last[block] = max(last.get(block, 0), rests[id(s)])
    highest = 0
    for moment in range(max(rests.values()) + 1):
        alive = [s for s in sequences if rests[id(s)] >= moment]
        grown = sum(store.blocks_for(s.length + moment) - (s.table.held if s.table else 0) for s in alive)
        highest = max(highest, grown + sum(until >= moment for until in last.values()))
    return highest


def test_blocks_that_several_hold_count_once_for_as_long_as_one_of_them_lives() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        store = KVStore(400, 4)
        live = []
        for _ in range(rng.randint(1, 8)):
            request = sequence(rng.randint(1, 60), rng.randint(1, 40))
            live.append(start(store, request) if rng.random() < 0.8 else request)
        store.check()
        assert committed_blocks(live, store) == exact(live, store), f"seed {seed}"


def test_the_forecast_is_never_below_what_is_held() -> None:
    store = KVStore(64, 4)
    seq = start(store, sequence(20, 4))
    assert seq.table is not None
    assert store.grow(seq.table, 20, 40, 0.0) is not None
    assert committed_blocks([seq], store) == store.pool.held == 10
