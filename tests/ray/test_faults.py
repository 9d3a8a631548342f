"""What happens when something is killed, and when there is no room: by the real thing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from cluster.registry import find_coordinator
from deploy.app import make_plan
from deploy.cluster import logs_of
from deploy.config import ClusterConfig
from deploy.service import Service, ServiceError
from tests.ray.stage import Stage, eventually, rank_processes

PROMPT = "The lighthouse keeper said"


def test_a_killed_rank_costs_its_clients_a_pause_and_its_group_is_rebuilt(tiny: Stage) -> None:
    undisturbed = tiny.complete(PROMPT, max_tokens=400)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: _text(tiny, 400))
        busy = eventually(lambda: [group for group in tiny.groups() if group["running"]])[0]
        os.kill(busy["ranks"][0]["pid"], signal.SIGKILL)
        assert answer.result() == undisturbed

    def rebuilt() -> bool:
        groups = {group["group"]: group for group in tiny.groups()}
        again = groups.get(busy["group"])
        return again is not None and again["state"] == "up" and again["epoch"] > busy["epoch"]

    eventually(rebuilt)
    assert len(rank_processes()) == 2
    logs = logs_of(tiny.link)
    assert logs is not None and len(list(logs.glob(f"tidegate-flight-*{busy['group']}*"))) == 1


def test_a_killed_ingress_loses_its_requests_when_its_lease_lapses(tiny: Stage) -> None:
    def ask(number: int) -> Iterator[object] | None:
        try:
            return list(tiny.stream([number + 3] * 20, max_tokens=8000))
        except Exception:
            return None

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(ask, number) for number in range(4)]
        eventually(lambda: tiny.total("running") == 4)
        ray.kill(_ingress())
        killed = time.monotonic()
        assert [answer.result() for answer in work] == [None] * 4
    assert tiny.total("held") > 0, "the groups go on until the lease is over"
    eventually(lambda: tiny.total("running") == 0 and tiny.total("held") == 0, 20)
    assert time.monotonic() - killed < 20
    eventually(lambda: tiny.total("grants") == 0, 20)
    eventually(lambda: _answers(tiny))


def test_a_restarted_coordinator_costs_nobody_anything(tiny: Stage) -> None:
    undisturbed = tiny.complete(PROMPT, max_tokens=400)["choices"][0]["text"]
    epochs = {group["group"]: group["epoch"] for group in tiny.groups()}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: _text(tiny, 400))
        eventually(lambda: tiny.total("running"))
        ray.kill(find_coordinator("tidegate"), no_restart=False)
        assert answer.result() == undisturbed

    def joined_again() -> bool:
        try:
            found = {group["group"]: group["epoch"] for group in tiny.groups() if group["state"] == "up"}
        except RayActorError:
            return False
        return found.keys() == epochs.keys() and all(found[name] > epochs[name] for name in epochs)

    eventually(joined_again, 20)
    assert _text(tiny, 400) == undisturbed, "streams that were open before carry what comes after"


def test_a_group_without_a_place_fails_at_once_with_the_numbers(stage: Stage, tiny_config: ClusterConfig) -> None:
    config = tiny_config.model_copy(update={"device": "cuda", "tensor_parallel_size": 2, "service_name": "toobig"})
    service = Service(stage.link, config.service_name, stage.run_dir)
    began = time.monotonic()
    with pytest.raises(ServiceError, match=r"wants? .*2 GPUs.* on one node; 127\.0\.0\.1 has .*0 GPUs"):
        service.start(make_plan(config, Path(config.model)), lambda text: None)
    assert time.monotonic() - began < 30


def _text(stage: Stage, tokens: int) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in stage.stream(PROMPT, max_tokens=tokens))


def _ingress() -> ray.actor.ActorHandle:
    actors = ray.util.list_named_actors(all_namespaces=True)
    name = next(actor["name"] for actor in actors if "ingress" in actor["name"])
    return ray.get_actor(name, "serve")


def _answers(stage: Stage) -> bool:
    try:
        return bool(stage.complete("hello", max_tokens=2))
    except (AssertionError, OSError):
        return False


@pytest.mark.slow
def test_a_group_whose_place_is_taken_fails_within_half_a_minute_with_the_numbers(
    tiny: Stage, tiny_config: ClusterConfig
) -> None:
    taken = placement_group([{"memory": int(ray.available_resources()["memory"]) - 2**28}])
    try:
        with pytest.raises(
            ServiceError, match=r"2 of 2 groups found no place within .* 1\.01 GiB of memory on one node; "
        ):
            tiny.show(tiny_config.model_copy(update={"kv_memory": 2**30}))
    finally:
        remove_placement_group(taken)
    assert _answers(tiny.show(tiny_config))
