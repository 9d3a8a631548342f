"""What `tidegate serve` refuses before it starts anything, and what it says when a start failed."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import app
from deploy.config import ClusterConfig, ConfigError
from deploy.room import Demand, cores_of_ranks, lack
from tests.ray.stage import free_port
from tests.unit.test_shapes import V3
from workers.native.build import NativeUnavailable

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(app, "start_ray", refuse)


def model(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "keys", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, {}, "MambaForCausalLM"),
        ({"num_key_value_heads": 3}, {}, "num_key_value_heads 3"),
        ({}, {"tensor_parallel_size": 5}, "at most 4"),
        (
            V3,
            {"kv_precision": "int4_channel"},
            "^kv_precision: MLA's latents cannot be kept in int4_channel; write",
        ),
        ({}, {"kv_precision": {"layers": {"0-99": "int8"}}}, r"^kv_precision\.layers\.0-99: the model has layers 0 to"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], keys: dict[str, object], said: str
) -> None:
    config = ClusterConfig(model=str(tmp_path), port=free_port(), **keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        app.run(config, [model(tmp_path, **fields)], print)


def test_what_can_be_served_goes_on_to_start_ray(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Ray was started"):
        app.run(ClusterConfig(model=str(tmp_path), port=free_port()), [model(tmp_path)], print)


def test_a_file_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    config = ClusterConfig(model=str(tmp_path), port=free_port(), api_keys_file=str(tmp_path / "keys.yaml"))
    with pytest.raises(ConfigError, match=r"api_keys_file: .* cannot be read"):
        app.run(config, [model(tmp_path)], print)


def test_each_of_several_models_is_checked(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, fields in zip(folders, ({}, {"architectures": ["MambaForCausalLM"]}), strict=True):
        folder.mkdir()
        model(folder, **fields)
    config = ClusterConfig.model_validate({"port": free_port(), "models": [{"model": str(f)} for f in folders]})
    with pytest.raises(ConfigError, match=r"two cannot be served: .*MambaForCausalLM"):
        app.run(config, folders, print)


@pytest.fixture
def ray_with_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_gpus(number: int) -> None:
        monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": float(number)})

    monkeypatch.setattr(app, "_cores", lambda: 8)
    return set_gpus


def bound(node: Any) -> tuple[Any, ...]:
    """The constructor's arguments of a bound deployment."""
    return tuple(node._bound_deployment.init_args)


def two_models(tmp_path: Path) -> tuple[ClusterConfig, list[Path]]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        model(folder)
        (folder / "model.safetensors").write_bytes(bytes(1000) + folder.name.encode())
    models = [
        {"model": str(folders[0]), "groups": 2, "kv_memory": "1MiB"},
        {"model": str(folders[1]), "tensor_parallel_size": 2, "served_model_names": ["b/chat", "b"], "max_num_seqs": 3},
    ]
    config = {"models": models, "device": "cpu", "drain_s": 4.0, "line": {"requests": 9}, "service_name": "two"}
    return ClusterConfig.model_validate(config), folders


def test_two_models_are_two_deployments_one_ingress_and_one_coordinator(tmp_path: Path, ray_with_gpus: Any) -> None:
    ray_with_gpus(0)
    config, folders = two_models(tmp_path)
    plan = app.make_plan(config, *folders)
    front, coordinator, version, owners = bound(plan.application)
    assert coordinator is plan.coordinator and isinstance(version, str)
    assert (coordinator.service, coordinator.terms.line.requests) == ("two", 9)
    assert [settings.names for settings in front.models] == [("a",), ("b/chat", "b")]
    deployments = [owner._bound_deployment for owner in owners]
    assert [one.name for one in deployments] == ["group-1-a", "group-2-b-chat"]
    assert [one.num_replicas for one in deployments] == [2, 1] and plan.groups == 3
    for owner, settings, ranks in zip(owners, front.models, (1, 2), strict=True):
        told, shared, bundles, drain_s = bound(owner)
        assert (told.model_dir, told.model_names, told.revision) == (settings.folder, settings.names, settings.revision)
        assert shared is coordinator and len(bundles) == ranks + 1 and drain_s == 4.0
        assert told.threads == 2, "eight cores for four ranks"
    assert [bound(owner)[0].max_num_seqs for owner in owners] == [64, 3]
    assert [demand.model for demand in plan.demands] == ["a", "b/chat"]
    assert front.models[0].revision != front.models[1].revision


def test_a_single_models_deployment_is_called_group(tmp_path: Path, ray_with_gpus: Any) -> None:
    ray_with_gpus(0)
    plan = app.make_plan(ClusterConfig(model=str(tmp_path)), model(tmp_path))
    *_, owners = bound(plan.application)
    assert [owner._bound_deployment.name for owner in owners] == ["group"]


def test_auto_takes_gpus_where_there_are_any(tmp_path: Path, ray_with_gpus: Any) -> None:
    for gpus, device in ((0, "cpu"), (1, "cuda")):
        ray_with_gpus(gpus)
        *_, owners = bound(app.make_plan(ClusterConfig(model=str(tmp_path)), model(tmp_path)).application)
        assert bound(owners[0])[0].device == device
        assert bound(owners[0])[2][1].get("GPU", 0) == gpus


@pytest.mark.parametrize(
    "change",
    [
        {"line": {"requests": 10}},
        {"ladder": "off"},
        {"session_ttl_s": 7.0},
        {"api_keys_file": "/keys"},
        {"models": [{"model": "/x"}, {"model": "/y"}]},
    ],
)
def test_another_config_is_another_deployment(tmp_path: Path, ray_with_gpus: Any, change: dict[str, Any]) -> None:
    ray_with_gpus(0)
    config, folders = two_models(tmp_path)
    one = app.make_plan(config, *folders).coordinator
    again = app.make_plan(config, *folders).coordinator
    other = ClusterConfig.model_validate(config.model_dump(exclude_unset=True) | change)
    assert again == one
    assert app.make_plan(other, *folders).coordinator.config != one.config


@pytest.mark.parametrize(("host", "keys", "refused"), [("0.0.0.0", None, True), ("127.0.0.1", None, False)])
def test_an_application_without_keys_is_built_only_behind_a_proxy_on_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, keys: str | None, refused: bool
) -> None:
    monkeypatch.setattr(app, "_proxy_host", lambda: host)
    monkeypatch.setattr(app, "resolve", lambda *_: (_ for _ in ()).throw(AssertionError("went on")))
    error, said = (ConfigError, f"Serve listens on {host}") if refused else (AssertionError, "went on")
    with pytest.raises(error, match=said):
        app.build(ClusterConfig(api_keys_file=keys))


def demand(groups: int, cpus: float, model: str = "m") -> Demand:
    return Demand(({"CPU": 0.01}, {"CPU": cpus}), groups, model)


def pair(cpus: float) -> Demand:
    """One group of two ranks that may be on two nodes."""
    return Demand(({"CPU": 0.01}, {"CPU": cpus}, {"CPU": cpus}), 1, "m", across=True)


@pytest.mark.parametrize(
    ("demands", "nodes", "lacks"),
    [
        ([demand(2, 1)], {"a": {"CPU": 3.0}}, None),
        ([demand(2, 1), demand(1, 0.5, "n")], {"a": {"CPU": 3.0}}, None),
        ([demand(2, 1), demand(1, 1.5, "n")], {"a": {"CPU": 3.0}}, "m: "),
        ([demand(1, 1), demand(1, 2, "n")], {"a": {"CPU": 1.5}, "b": {"CPU": 2.5}}, None),
        ([demand(1, 4)], {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}, "a group wants 4.01 CPUs"),
        ([pair(2)], {"a": {"CPU": 2.5}, "b": {"CPU": 2.5}}, None),
        ([pair(2), demand(1, 0.4, "n")], {"a": {"CPU": 2.5}, "b": {"CPU": 2.5}}, None),
        (
            [pair(2), demand(1, 1, "n")],
            {"a": {"CPU": 2.5}, "b": {"CPU": 2.5}},
            "n: a group wants 1.01 CPUs on one node",
        ),
    ],
)
def test_room_is_counted_over_all_models(demands: list[Demand], nodes: dict[str, dict[str, float]], lacks: str) -> None:
    found = lack(demands, nodes)
    assert found is None if lacks is None else found is not None and found.startswith(lacks)


@pytest.mark.parametrize(
    ("here", "nodes", "cores"),
    [
        ({"CPU": 4.0}, {"a": {"CPU": 4.0}}, 2),
        ({"CPU": 4.0}, {"a": {"CPU": 4.0}, "b": {"CPU": 64.0}}, 2),
        ({"CPU": 0.0}, {"head": {"CPU": 0.0}, "a": {"CPU": 8.0}, "b": {"CPU": 16.0}}, 16),
        ({}, {"head": {"node:__internal_head__": 1.0}}, 2),
    ],
)
def test_ranks_share_the_cores_of_a_node_that_computes(
    here: dict[str, float], nodes: dict[str, dict[str, float]], cores: int
) -> None:
    """A head that only controls says nothing of what the others have."""
    assert cores_of_ranks(2, here, nodes) == cores


@pytest.mark.parametrize(("placement", "strategy"), [("node", "STRICT_PACK"), ("nodes", "PACK")])
def test_a_group_is_on_one_node_unless_it_may_go_over_several(
    tmp_path: Path, ray_with_gpus: Any, placement: str, strategy: str
) -> None:
    ray_with_gpus(0)
    config = ClusterConfig.model_validate(
        {"model": str(tmp_path), "tensor_parallel_size": 2, "placement": placement, "device": "cpu"}
    )
    plan = app.make_plan(config, model(tmp_path))
    *_, owners = bound(plan.application)
    assert owners[0]._bound_deployment._replica_config.placement_group_strategy == strategy
    assert [demand.across for demand in plan.demands] == [placement == "nodes"]


def test_kernels_for_the_formats_of_the_cache_are_compiled_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    monkeypatch.setattr(app, "built", lambda _, __, part: asked.put(part and part.name))
    kept = {"default": {"k": "int8", "v": "int4"}, "layers": {"0-1": "auto", "-1": {"k": "int4", "v": "bf16"}}}
    app._compile_ahead(ClusterConfig.model_validate({"kv_precision": kept}))
    assert {asked.get(timeout=5) for _ in range(3)} == {None, "int8-int4", "bf16-bf16"}, "there are none for the last"


@pytest.mark.parametrize(("keys", "asked"), [({}, 1), ({"kernels": "torch"}, 0), ({"device": "cuda"}, 0)])
def test_kernels_are_compiled_while_ray_starts(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], asked: int
) -> None:
    """A failure there is no failure of the launch: the ranks look again, and say what they found."""
    compiled = threading.Event()

    def refuse(*_: object) -> None:
        compiled.set()
        raise NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(app, "built", refuse)
    app._compile_ahead(ClusterConfig.model_validate(keys))
    assert compiled.wait(5 if asked else 0.2) == bool(asked)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: GraniteForCausalLM .* set tensor_parallel_size: 1"),
        ({"weight_precision": "int8"}, "weight_precision int8: GraniteForCausalLM .* set weight_precision: auto"),
        ({"kv_precision": {"layers": {"0-9": "int8"}}}, r"kv_precision\.layers\.0-9: the model has layers 0 to 1"),
    ],
)
def test_a_model_that_transformers_computes_says_which_keys_it_cannot_have(
    tmp_path: Path, keys: dict[str, object], said: str
) -> None:
    config = ClusterConfig(model=str(tmp_path), port=free_port(), **keys)  # type: ignore[arg-type]
    folder = model(tmp_path, architectures=["GraniteForCausalLM"], model_type="granite")
    with pytest.raises(ConfigError, match=said):
        app.check(config, [folder])
