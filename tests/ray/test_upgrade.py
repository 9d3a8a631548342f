"""One service in place of another: what fails says why, and nothing of the one before is left."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from cluster.registry import end_coordinator
from deploy.app import build
from deploy.config import ClusterConfig
from deploy.service import ServiceError
from tests.ray.stage import Stage, rank_processes


def test_weights_that_do_not_fit_their_config_end_the_start_with_the_reason(
    stage: Stage, tiny_config: ClusterConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_config.model, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 112}))
    with pytest.raises(ServiceError, match=r"mlp\.\w+_proj\.weight has shape .* config\.json implies"):
        stage.show(tiny_config.model_copy(update={"model": str(folder), "groups": 1}))


def test_a_redeploy_leaves_nothing_of_the_service_before(
    stage: Stage, tiny_config: ClusterConfig, smollm2: Path
) -> None:
    stage.show(tiny_config)
    before, coordinator = rank_processes(), _actors("tidegate-coordinator")
    assert len(before) == 2
    stage.show(_real(tiny_config, smollm2))
    after = rank_processes()
    assert len(after) == 2 and not after & before
    assert len(_actors("tidegate-coordinator")) == 1 and _actors("tidegate-coordinator") != coordinator
    assert len(_actors("-rank")) == 2
    assert len(_actors("SERVE_REPLICA")) == 2, "one owner, one ingress"
    states = [group["state"] for group in placement_group_table().values()]
    assert states.count("CREATED") == 1 and set(states) <= {"CREATED", "REMOVED"}
    assert len(stage.groups()) == 1 and len(stage.groups()[0]["ranks"]) == 2


def test_a_redeploy_with_more_groups_comes_up_where_there_is_no_room_beside_the_old_ones(
    stage: Stage, tiny_config: ClusterConfig
) -> None:
    stage.show(tiny_config.model_copy(update={"groups": 1}))
    before = rank_processes()
    stage.show(tiny_config)
    assert len(stage.groups()) == 2 and len(rank_processes()) == 2
    assert not rank_processes() & before
    assert stage.complete("still here", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_the_real_model_on_two_ranks_answers_a_chat(stage: Stage, tiny_config: ClusterConfig, smollm2: Path) -> None:
    stage.show(_real(tiny_config, smollm2))
    client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key="none")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=16)
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=16, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3


@pytest.mark.slow
def test_a_killed_follower_takes_its_group_along_and_the_answer_goes_on(
    stage: Stage, tiny_config: ClusterConfig, smollm2: Path
) -> None:
    stage.show(_real(tiny_config, smollm2))
    whole = stage.complete("The tide", max_tokens=60)["choices"][0]["text"]
    group = stage.groups()[0]
    pieces = []
    for chunk in stage.stream("The tide", max_tokens=60):
        pieces.append(chunk["choices"][0]["text"])
        if len(pieces) == 5:
            os.kill(group["ranks"][1]["pid"], signal.SIGKILL)
    assert "".join(pieces) == whole
    again = stage.groups()[0]
    assert again["group"] == group["group"] and again["epoch"] > group["epoch"]
    assert not {rank["pid"] for rank in again["ranks"]} & {rank["pid"] for rank in group["ranks"]}


def test_serve_gives_the_builder_its_typed_argument(stage: Stage, tiny_config: ClusterConfig) -> None:
    assert inspect.signature(build).parameters["args"].annotation is ClusterConfig, "the class, not its name"
    built = build(tiny_config.model_copy(update={"service_name": "built"}))
    assert isinstance(built, serve.Application)
    end_coordinator("built")


def test_a_second_prompt_with_the_same_head_finds_it_cached(
    stage: Stage, tiny_config: ClusterConfig, smollm2: Path
) -> None:
    stage.show(_real(tiny_config, smollm2))
    head = "The tide comes in twice a day, and twice a day it goes out again. " * 8
    first = stage.complete(head + "Then", max_tokens=4)["usage"]["prompt_tokens_details"]["cached_tokens"]
    second = stage.complete(head + "Later", max_tokens=4)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first == 0 and second >= 64


def test_health_names_the_group_and_models_the_context(stage: Stage, tiny_config: ClusterConfig, smollm2: Path) -> None:
    stage.show(_real(tiny_config, smollm2))
    health = httpx.get(f"{stage.url}/health").json()
    assert [group["ready"] for group in health["groups"]] == [True]
    models = httpx.get(f"{stage.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["smollm2"]


def _real(tiny: ClusterConfig, smollm2: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(smollm2),
        served_model_names=("smollm2",),
        tensor_parallel_size=2,
        port=tiny.port,
        device="cpu",
        dtype="fp32",
        threads=1,
        kv_memory="64MiB",
        drain_s=2.0,
    )


def _actors(part: str) -> set[str]:
    """Named living actors with `part` in their name, with their process to tell one from its successor."""
    found = set()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if part in actor["name"]:
            handle = ray.get_actor(actor["name"], actor["namespace"])
            found.add(f"{actor['name']} {handle._actor_id.hex()}")
    return found
