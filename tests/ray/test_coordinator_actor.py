"""The coordinator as an actor: one per service and config, found again after its death, gone when nobody calls."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import RayActorError

from cluster.actors import CoordinatorMissing, end_coordinator, find_coordinator, open_coordinator
from cluster.coordination.cards import PROTOCOL
from cluster.links import CoordinatorLink
from tests.ray.stage import Stage, eventually

SERVICE = "alone"


def test_a_coordinator_is_shared_by_its_config_and_replaced_by_a_deployment_of_another(stage: Stage) -> None:
    first = open_coordinator(SERVICE, "config a")
    assert open_coordinator(SERVICE, "config a", replace=True)._actor_id == first._actor_id
    with pytest.raises(CoordinatorMissing, match="another deployment"):
        open_coordinator(SERVICE, "config b")
    second = open_coordinator(SERVICE, "config b", replace=True)
    assert second._actor_id != first._actor_id
    assert tuple(ray.get(second.identity.remote())) == (PROTOCOL, "config b")
    with pytest.raises(RayActorError):
        ray.get(first.identity.remote())
    end_coordinator(SERVICE)
    with pytest.raises(CoordinatorMissing):
        eventually(lambda: find_coordinator(SERVICE) is None, 5)


def test_a_replica_of_an_old_config_does_not_join_its_successor(stage: Stage) -> None:
    async def talk() -> None:
        old = await CoordinatorLink.open(SERVICE, "old")
        assert await old.groups() == ()
        await asyncio.to_thread(open_coordinator, SERVICE, "new", replace=True)
        new = await CoordinatorLink.open(SERVICE, "new")
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await old.groups()
        assert await new.groups() == ()

    asyncio.run(talk())
    end_coordinator(SERVICE)


def test_a_coordinator_whose_process_died_answers_again_under_the_same_handle(stage: Stage) -> None:
    handle = open_coordinator(SERVICE, "config a")
    ray.kill(handle, no_restart=False)

    def answers() -> bool:
        try:
            return tuple(ray.get(handle.identity.remote())) == (PROTOCOL, "config a")
        except RayActorError:
            return False

    eventually(answers, 20)
    end_coordinator(SERVICE)


def test_a_coordinator_that_nobody_calls_ends_itself(stage: Stage) -> None:
    handle = open_coordinator(SERVICE, "config a", idle_s=1.0)

    def gone() -> bool:
        try:
            find_coordinator(SERVICE)
        except CoordinatorMissing:
            return True
        return False

    eventually(gone, 15)
    with pytest.raises(RayActorError):
        ray.get(handle.identity.remote())


def test_news_arrives_at_once_and_silence_ends_in_time(stage: Stage) -> None:
    handle = open_coordinator(SERVICE, "config a")
    waiting = handle.notices.remote(0, 30.0)
    ray.get(handle.notice.remote("g", "loading weights"))
    assert [notice.text for notice in ray.get(waiting, timeout=5)] == ["loading weights"]
    assert ray.get(handle.notices.remote(1, 0.1), timeout=5) == ()
    end_coordinator(SERVICE)
