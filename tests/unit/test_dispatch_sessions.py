"""Sessions seen from an ingress: where they are cached, and that forgetting is answered when it is certain."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import ApiError
from cluster.generation import Generation
from cluster.requests import sessions
from tests.inprocess import InProcessCluster, InProcessGroup, generation
from tests.unit.test_dispatch import run

PROMPT = tuple(range(1, 41))


async def say(cluster: InProcessCluster, name: str, session: str | None, prompt: tuple[int, ...] = PROMPT) -> int:
    """Generate in a session; the prompt tokens that were cached."""
    asked = Generation(name, prompt, generation("x", 4, prompt).sampling, "m", session=session)
    return [event async for event in cluster.requests.generate(asked)][-1].cached


async def known(cluster: InProcessCluster) -> None:
    for group in cluster.groups.values():
        if group.engine.dead is None:
            await group.report()


def with_groups(cluster: InProcessCluster) -> list[InProcessGroup]:
    return [cluster.add(name) for name in "ab"]


def test_a_session_is_found_where_it_is_and_gone_when_it_is_forgotten() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            with_groups(cluster)
            assert await cluster.requests.session("default", "s") == ()
            await say(cluster, "r1", "s")
            await say(cluster, "other", "t")
            await known(cluster)
            (copy,) = await cluster.requests.session("default", "s")
            assert (copy.blocks, copy.tokens) == (2, 32) and copy.expires_s > 0
            assert await cluster.requests.forget_session("default", "s") == 2
            await known(cluster)
            assert await cluster.requests.session("default", "s") == ()
            assert len(await cluster.requests.session("default", "t")) == 1, "another session keeps its own"
            assert await say(cluster, "r2", "s") == 0
            assert await cluster.requests.forget_session("default", "nobody's") == 0

    run(case)


def test_every_group_is_asked_also_those_that_this_ingress_never_used() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = with_groups(cluster)
            await cluster.requests.forget_session("default", "s")
            assert [cluster.port_to(group).calls["purge"] for group in groups] == [1, 1]

    run(case)


def test_a_dead_group_has_nothing_left_to_forget() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = with_groups(cluster)
            await say(cluster, "r1", "s")
            await groups[0].kill()
            assert await cluster.requests.forget_session("default", "s") in (0, 2)

    run(case)


@pytest.mark.parametrize("fault", ["a group fails", "a group is silent", "the coordinator is down"])
def test_forgetting_is_not_said_to_be_done_when_it_is_not_certain(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PURGE_S", 0.05)

    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = with_groups(cluster)
            await say(cluster, "r1", "s")
            port = cluster.requests._engine_at(groups[0].address)
            cluster.requests._desk._engine = lambda address: port if address == groups[0].address else other
            other = cluster._engine(groups[1].address)
            if fault == "a group fails":
                cluster.port_to(groups[0]).fail["purge"] = [ConnectionError("no answer")]
            elif fault == "a group is silent":
                groups[0].tasks[0].cancel()
            else:
                cluster.port.down = True
            with pytest.raises(ApiError) as error:
                await cluster.requests.forget_session("default", "s")
            assert (error.value.code, error.value.status) == ("not_confirmed", 503)
            if fault == "the coordinator is down":
                with pytest.raises(ApiError) as unknown:
                    await cluster.requests.session("default", "s")
                assert unknown.value.status == 503
            cluster.port.down = False
            if fault != "a group is silent":
                assert await cluster.requests.forget_session("default", "s") == 2

    run(case)


def test_a_session_is_forgotten_while_its_own_request_runs() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a", steps_s=0.002)
            asked = Generation("r", PROMPT, generation("x", 40).sampling, "m", session="s")
            stream = cluster.requests.generate(asked)
            await anext(stream)
            await asyncio.sleep(0.02)
            await cluster.requests.forget_session("default", "s")
            events = [event async for event in stream]
            assert events[-1].finish is not None
            assert await say(cluster, "again", "s", PROMPT[:33]) <= 32
            await cluster.settled()

    run(case)
