"""The cluster under faults, simulated: many seeds, every invariant as it runs. A failure names its seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.simulated_faults import CALM, Faults
from tests.simulation import World
from workers.sequence import Priority

SEEDS = 300
PER_TEST = 20
HONEST = {"stop", "length", "left", "no_group", "cluster_full", "tenant_limit", "timed_out", "poisoned_request"}


def play(
    seed: int, seconds: float = 20.0, every: float = 0.1, faults: Faults | None = None, groups: int = 3, **more: float
) -> World:
    """`seconds` of arrivals and faults, then calm."""
    world = World(seed, groups=groups, faults=faults, **more)  # type: ignore[arg-type]

    def arrivals() -> None:
        if world.now < seconds:
            world.arrive()
            world.after(world.chance.expovariate(1 / every), arrivals)

    world.after(0.5, arrivals)
    world.run(seconds)
    world.settle_down()
    return world


def batches() -> list[object]:
    """The seeds, some per test so that a report stays short; the first batch runs every time."""
    starts = range(0, SEEDS, PER_TEST)
    return [pytest.param(start, marks=() if start == 0 else pytest.mark.slow) for start in starts]


@pytest.mark.parametrize("first", batches())
def test_any_faults_at_once(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PER_TEST):
        world = play(seed)
        ends = world.tally()
        happened += Counter(
            moves=world.invariants.moves,
            grantless=len(world.grantless),
            shortages=world.invariants.shortages,
            replays=sum(attempt > 0 for _, attempt in world.invariants.accepted),
            poisoned=ends["poisoned_request"],
            late=ends["timed_out"],
            refused=ends["cluster_full"],
        )
        assert world.events >= 2000, f"seed {seed}: only {world.events} events"
        taken = sum(ends.values()) - ends["cluster_full"] - ends["tenant_limit"]
        assert ends["stop"] + ends["length"] >= 0.2 * taken, f"seed {seed}: {ends}"
        assert set(ends) <= HONEST, f"seed {seed}: {ends}"
    assert len(happened) == 7, f"seeds from {first}: not everything that may go wrong did: {happened}"


@pytest.mark.parametrize("seed", range(1000, 1004))
def test_without_faults_every_request_finishes_at_its_first_attempt(seed: int) -> None:
    world = play(seed, every=0.3, faults=CALM, groups=4)
    assert set(world.ends.values()) <= {"stop", "length"}, f"seed {seed}"
    assert {attempt for _, attempt in world.invariants.accepted} == {0}, f"seed {seed}"


@pytest.mark.parametrize(
    "fault",
    [
        {"crash_s": 4.0},
        {"hang_s": 5.0},
        {"short": 0.2},
        {"coordinator_s": 4.0},
        {"drain_s": 5.0},
        {"break_s": 0.3},
        {"lost": 0.05, "late": 0.05, "twice": 0.05},
    ],
    ids=lambda fault: "+".join(fault),
)
@pytest.mark.parametrize("seed", range(2000, 2003))
def test_each_fault_alone_costs_a_pause_and_no_answer(fault: dict[str, float], seed: int) -> None:
    world = play(seed, every=0.8, faults=replace(CALM, **fault))
    assert world.tally()["poisoned_request"] <= 1, f"seed {seed}: three deaths by chance, one of them alone"
    assert set(world.ends.values()) <= {"stop", "length", "poisoned_request"}, f"seed {seed}: {world.tally()}"


@pytest.mark.parametrize("seed", range(3000, 3004))
def test_a_poison_request_ends_with_one_error_and_its_neighbours_finish(seed: int) -> None:
    world = play(seed, every=1.0, seconds=40.0, faults=replace(CALM, poison=0.1))
    assert world.poisonous, f"seed {seed} has none"
    for name, end in world.ends.items():
        expected = {"poisoned_request"} if name in world.poisonous else {"stop", "length"}
        assert end in expected, f"seed {seed}: {name} ended as {end}"


@pytest.mark.parametrize("seed", range(4000, 4004))
def test_overload_is_refused_or_served_and_nobody_waits_for_ever(seed: int) -> None:
    world = play(seed, every=0.02, faults=replace(CALM, deadlines=True))
    ends = world.tally()
    assert set(ends) <= {"stop", "length", "cluster_full", "tenant_limit", "timed_out"}, f"seed {seed}: {ends}"
    assert ends["cluster_full"] + ends["tenant_limit"] > 0, f"seed {seed}: {ends}"
    waits = world.waited
    assert max(waits[Priority.INTERACTIVE], default=0) < 60 and max(waits[Priority.BATCH], default=0) < 120


def test_the_same_seed_is_the_same_run() -> None:
    one, two = play(7, 10.0), play(7, 10.0)
    assert (one.events, one.now, one.ends) == (two.events, two.now, two.ends)
