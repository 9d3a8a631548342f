"""While the coordinator is away: groups that are known take new work under their own limits, and nothing gets lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cluster.coordination.cards import GroupCard, GroupState, Standing
from cluster.coordination.grants import Ask
from cluster.errors import ApiError
from cluster.requests.directory import KNOWN_S, Directory
from cluster.requests.work import Endurance
from tests.inprocess import InProcessCluster, check
from tests.unit.test_dispatch import run

ASK = Ask("r", 0, "m", b"n", 20, 13)


def state(name: str, *, load: float = 0.0, standing: Standing = Standing.UP, models: tuple[str, ...] = ("m",)):  # type: ignore[no-untyped-def]
    card = GroupCard(name, models, f"at-{name}", 64, 16, 8, 512, 256)
    return GroupState(card, 1, standing, 0, 0, 0, 0, load, 0.0, 0.0)


class Told:
    """A coordinator that says `states`, at time `now`."""

    def __init__(self, *states: GroupState) -> None:
        self.states = states
        self.now = 100.0
        self.directory = Directory(self, lambda: self.now)  # type: ignore[arg-type]
        asyncio.run(self.directory.refresh())

    async def groups(self) -> tuple[GroupState, ...]:
        return self.states

    def grant(self, ask: Ask = ASK, tried: set[tuple[str, int]] | None = None) -> str | None:
        grant = self.directory.grant(ask, tried if tried is not None else set())
        assert grant is None or (grant.id, grant.epoch, grant.address) == ("", 1, f"at-{grant.group}")
        return grant.group if grant else None


def test_an_own_grant_covers_prompt_and_output_and_goes_to_the_least_loaded() -> None:
    told = Told(state("a", load=0.8), state("b", load=0.1), state("c", load=0.4))
    grant = told.directory.grant(ASK, set())
    assert grant is not None and (grant.group, grant.blocks, grant.request, grant.attempt) == ("b", 3, "r", 0)


def test_equals_take_turns_and_what_they_were_given_counts() -> None:
    told = Told(state("a"), state("b"), state("c"), state("d", load=0.25))
    assert Counter(told.grant() for _ in range(6)) == {"a": 2, "b": 2, "c": 2}
    assert Counter(told.grant() for _ in range(4)) == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize(
    "unfit",
    [
        {"standing": Standing.STALLED},
        {"standing": Standing.LAPSED},
        {"standing": Standing.LEAVING},
        {"models": ("another",)},
    ],
)
def test_only_groups_that_are_up_and_serve_the_model_are_taken(unfit: dict[str, object]) -> None:
    assert Told(state("a", **unfit), state("b", load=5.0)).grant() == "b"  # type: ignore[arg-type]
    assert Told(state("a", **unfit)).grant() is None  # type: ignore[arg-type]


def test_what_a_request_saw_die_or_has_tried_or_cannot_fit_is_not_taken() -> None:
    told, tried = Told(state("a"), state("b")), set[tuple[str, int]]()
    assert told.grant(replace(ASK, avoid=(("a", 1),))) == "b"
    assert told.grant(replace(ASK, max_tokens=1000)) is None
    assert {told.grant(tried=tried), told.grant(tried=tried)} == {"a", "b"}
    assert told.grant(tried=tried) is None


def test_who_must_run_alone_waits_for_the_coordinator() -> None:
    assert Told(state("a")).grant(replace(ASK, alone=True)) is None


def test_what_is_known_ages() -> None:
    told = Told(state("a"))
    told.now += KNOWN_S - 0.1
    assert told.directory.stale and told.grant() == "a"
    told.now += 0.2
    assert told.grant() is None


def test_new_work_runs_at_the_groups_that_are_known() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = [cluster.add(name, blocks=512) for name in "ab"]
            check(await cluster.generate("first"))
            cluster.port.down = True
            prompts = [(1, n) for n in range(12)]
            results = await asyncio.gather(*(cluster.generate(f"r{p[1]}", 20, p) for p in prompts))
            for prompt, events in zip(prompts, results, strict=True):
                check(events, 20, prompt)
            taken = [len([key for key, grant in group.engine.accepted_keys if not grant]) for group in groups]
            assert taken == [6, 6]
            settles, withdrawals = cluster.port.calls["settle"], cluster.port.calls["withdraw"]
            cluster.port.down = False
            await asyncio.sleep(0.3)
            assert cluster.port.calls["withdraw"] == withdrawals == 0 and cluster.port.calls["settle"] <= settles + 1
            await cluster.settled()

    run(case)


def test_a_group_without_room_is_passed_by_and_asked_again_later() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = [cluster.add(name, max_num_seqs=2, blocks=64, steps_s=0.002) for name in "ab"]
            check(await cluster.generate("first"))
            cluster.port.down = True
            prompts = [(1, n) for n in range(20)]
            results = await asyncio.gather(*(cluster.generate(f"r{p[1]}", 40, p) for p in prompts))
            for prompt, events in zip(prompts, results, strict=True):
                check(events, 40, prompt)
            refused = sum(cluster.port_to(group).calls["submit"] for group in groups)
            assert refused > 2, "they were full for a while"
            cluster.port.down = False
            await cluster.settled()

    run(case)


@pytest.mark.parametrize("restarted", [True, False])
def test_those_in_line_run_meanwhile_or_are_asked_again(restarted: bool) -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a", max_num_seqs=2, steps_s=0.002)
            prompts = [(1, n) for n in range(20)]
            tasks = [asyncio.create_task(cluster.generate(f"r{p[1]}", 30, p)) for p in prompts]
            await asyncio.sleep(0.05)
            assert cluster.coordinator.waiting > 10
            cluster.port.down = True
            await asyncio.sleep(0.2)
            if restarted:
                cluster.restart_coordinator(1000)
            cluster.port.down = False
            for prompt, events in zip(prompts, await asyncio.gather(*tasks), strict=True):
                check(events, 30, prompt)
            await cluster.settled()
            closed = [outcome.grant for outcome in cluster.port.outcomes] + cluster.port.withdrawn
            assert "" not in closed

    run(case)


def test_a_group_that_dies_meanwhile_costs_a_pause() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            first = cluster.add("a", steps_s=0.001)
            cluster.add("b", steps_s=0.001)
            check(await cluster.generate("first"))
            cluster.port.down = True
            prompts = [(1, n) for n in range(6)]
            tasks = [asyncio.create_task(cluster.generate(f"r{p[1]}", 60, p)) for p in prompts]
            await asyncio.sleep(0.03)
            await first.kill()
            for prompt, events in zip(prompts, await asyncio.gather(*tasks), strict=True):
                check(events, 60, prompt)
            cluster.port.down = False

    run(case)


def test_without_any_group_known_it_is_asked_again_until_patience_ends() -> None:
    async def case() -> None:
        async with InProcessCluster(Endurance(patience_s=0.5)) as cluster:
            cluster.port.down = True
            with pytest.raises(ApiError) as error:
                await cluster.generate("r")
            assert error.value.code == "timed_out" and cluster.port.calls["place"] >= 2
            cluster.port.down = False

    run(case)
