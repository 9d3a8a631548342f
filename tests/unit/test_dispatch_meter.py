"""What an ingress measures of its requests: each observation once, in the shell's own seconds."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import ApiError
from cluster.generation import Generation
from cluster.requests.meter import LEFT, Ending, Labels, NoMeter
from cluster.requests.work import Endurance
from tests.inprocess import InProcessCluster, check, generation
from tests.unit.test_dispatch import run
from workers.sequence import Priority


class Recording:
    def __init__(self) -> None:
        self.queued: list[float] = []
        self.first: list[float] = []
        self.next: list[tuple[float, int]] = []
        self.endings: list[tuple[Labels, Ending]] = []

    def accepted(self, labels: Labels, seconds: float) -> None:
        self.queued.append(seconds)

    def first_token(self, labels: Labels, seconds: float) -> None:
        self.first.append(seconds)

    def next_tokens(self, labels: Labels, seconds: float, tokens: int) -> None:
        self.next.append((seconds, tokens))

    def ended(self, labels: Labels, ending: Ending) -> None:
        self.endings.append((labels, ending))


def test_a_request_is_measured_from_arrival_to_end() -> None:
    meter = Recording()

    async def case() -> None:
        async with InProcessCluster(meter=meter) as cluster:
            cluster.add("a", steps_s=0.005)
            asked = Generation("r", (1, 2, 3), generation("x", 10).sampling, "m", priority=Priority.BATCH)
            check([event async for event in cluster.requests.generate(asked)], 10)

    run(case)
    ((labels, ending),) = meter.endings
    assert (labels.model, labels.tenant, labels.priority) == ("m", "default", Priority.BATCH)
    assert (ending.finish, ending.prompt_tokens, ending.output_tokens) == ("length", 3, 10)
    assert (ending.replays, ending.deaths, ending.poisoned) == (0, 0, False)
    (queued,), (first,) = meter.queued, meter.first
    assert 0 <= queued <= first <= ending.seconds
    assert sum(tokens for _, tokens in meter.next) == 9
    assert first + sum(seconds for seconds, _ in meter.next) == pytest.approx(ending.seconds, abs=1e-3)


def test_every_way_to_end_has_its_word() -> None:
    meter = Recording()

    async def case() -> None:
        async with InProcessCluster(Endurance(timeout_s=0.2, grace_s=0.0), meter=meter) as cluster:
            with pytest.raises(ApiError):
                await cluster.generate("no group")
            cluster.add("a", steps_s=0.01, blocks=64)
            with pytest.raises(ApiError):
                await cluster.generate("never fits", 5000)
            await cluster.generate("late", 900)
            stream = cluster.requests.generate(generation("left", 900))
            await anext(stream)
            await stream.aclose()
            await cluster.settled()

    run(case)
    assert [ending.finish for _, ending in meter.endings] == ["no_group", "never_fits", "timed_out", LEFT]
    assert meter.endings[2][1].output_tokens > 0


def test_a_replay_is_counted_with_the_death_that_caused_it() -> None:
    meter = Recording()

    async def case() -> None:
        async with InProcessCluster(meter=meter) as cluster:
            first = cluster.add("a", steps_s=0.002)
            task = asyncio.create_task(cluster.generate("r", 60))
            while not meter.first:
                await asyncio.sleep(0.005)
            cluster.add("b")
            await first.kill()
            check(await task, 60)

    run(case)
    ((_, ending),) = meter.endings
    assert (ending.replays, ending.deaths, ending.poisoned, ending.output_tokens) == (1, 1, False, 60)
    assert len(meter.queued) == len(meter.first) == 1


def test_measuring_nothing_is_a_meter_too() -> None:
    async def case() -> None:
        async with InProcessCluster(meter=NoMeter()) as cluster:
            cluster.add("a")
            check(await cluster.generate("r"))

    run(case)
