"""The cluster under faults, simulated: many seeds, every invariant after every event. A failure names its seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import CALM, Faults, World


def play(seed: int, seconds: float = 30.0, every: float = 0.1, faults: Faults | None = None, groups: int = 3) -> World:
    """`seconds` of arrivals and faults, then calm."""
    world = World(seed, groups=groups, faults=faults)

    def arrivals() -> None:
        if world.now < seconds:
            world.arrive()
            world.after(world.chance.expovariate(1 / every), arrivals)

    world.after(0.5, arrivals)
    world.run(seconds)
    world.settle_down()
    return world


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 60))])
def test_any_faults_at_once(seed: int) -> None:
    world = play(seed)
    ends = Counter(world.ends.values())
    assert world.events >= 2000
    assert ends["stop"] + ends["length"] >= 0.25 * sum(ends.values()), f"seed {seed}: {ends}"
    assert set(ends) <= {"stop", "length", "left", "no_group", "cluster_full", "timed_out"}, f"seed {seed}: {ends}"


@pytest.mark.parametrize("seed", range(100, 102))
def test_without_faults_every_request_finishes_at_its_first_attempt(seed: int) -> None:
    world = play(seed, every=0.3, faults=CALM, groups=4)
    assert set(world.ends.values()) <= {"stop", "length"}, f"seed {seed}"
    assert {attempt for _, attempt in world.accepted} == {0}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(200, 203))
def test_crashes_alone_lose_no_accepted_request(seed: int) -> None:
    world = play(seed, every=0.3, faults=Faults(0, 0, 0, 4.0, 0, 0, 0, 0, 0))
    ends = Counter(world.ends.values())
    assert set(ends) <= {"stop", "length", "no_group"}, f"seed {seed}: {ends}"
    assert max(attempt for _, attempt in world.accepted) >= 1, f"seed {seed}: nothing was replayed"


@pytest.mark.parametrize("seed", range(300, 302))
def test_a_coordinator_that_restarts_fails_no_running_request(seed: int) -> None:
    world = play(seed, every=0.3, faults=Faults(0, 0, 0, 0, 0, 0, 5.0, 0, 0))
    ends = Counter(world.ends.values())
    assert set(ends) <= {"stop", "length", "no_group"}, f"seed {seed}: {ends}"


def test_the_same_seed_is_the_same_run() -> None:
    one, two = play(7, 10.0), play(7, 10.0)
    assert (one.events, one.now, one.ends, one.granted) == (two.events, two.now, two.ends, two.granted)
