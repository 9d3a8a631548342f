"""What groups, ingresses and the coordinator are told comes from the config's keys; and the files that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cluster.coordination.terms import CoordinatorTerms, LineBounds, Thresholds
from cluster.settings import IngressSettings
from deploy.config import ClusterConfig, Environment, load
from deploy.files import file_faults
from deploy.sections import LadderSection, LineSection
from deploy.settings import coordinator_settings, group_settings, ingress_settings
from kvstore.precisions import PrecisionMap
from workers.settings import GroupSettings


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "service.yaml"
        path.write_text(text)
        return path

    return to_file


def told(
    config: ClusterConfig, *, device: str = "cpu", cores: int = 1, model: int = 0, encrypted: bool = False
) -> GroupSettings:
    section, environment = config.sections[model], Environment(Path("/cache"), encrypted=encrypted)
    return group_settings(config, section, Path("/m"), "r", device=device, cores=cores, environment=environment)


def test_group_settings_share_memory_and_cores_between_ranks() -> None:
    config = load(None, {"groups": 2, "tensor_parallel_size": 2, "kv_memory": "72MiB", "prefix_cache": False})
    cpu = told(config, cores=9)
    assert (cpu.threads, cpu.memory_fraction, cpu.kv_memory) == (2, 0.25 / 4, 72 * 2**20)
    assert (cpu.model_dir, cpu.model_names, cpu.revision, cpu.prefix_cache) == ("/m", ("smollm2-135m",), "r", False)
    gpu = told(config, device="cuda", cores=9)
    assert (gpu.threads, gpu.memory_fraction) == (1, 0.9)
    assert told(config).threads == 1
    assert told(load(None, {"threads": 5}), device="cuda").threads == 5
    assert cpu.native_dir == "/cache/native"


def test_groups_of_all_models_share_the_machine(write) -> None:
    config = load(write("models:\n  - {model: a, groups: 2}\n  - {model: b, tensor_parallel_size: 4}\n"))
    assert (config.ranks, config.names) == (6, ("a", "b"))
    settings = [told(config, cores=12, model=model) for model in (0, 1)]
    assert [one.threads for one in settings] == [2, 2]
    assert sum(one.memory_fraction * ranks for one, ranks in zip(settings, (2, 4), strict=True)) == pytest.approx(0.25)


PER_MODEL = {
    "dtype": "fp32",
    "kv_precision": PrecisionMap.parse({"default": "int8", "layers": {"0-2": "bf16"}}),
    "kernels": "native-avx2",
    "weight_precision": "int8",
    "block_size": 64,
    "kv_memory": 2**20,
    "max_model_len": 77,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 640,
    "prefix_cache": False,
    "overlap": 2,
    "tensor_parallel_size": 3,
    "threads": 4,
}
PER_SERVICE = {
    "session_ttl_s": 1.5,
    "streams": "ray",
    "stream_pace_s": 0.5,
    "step_timeout_s": 7.0,
    "flight_dir": "/flights",
}


def test_what_ray_encrypts_does_not_leave_by_a_socket_of_our_own() -> None:
    chosen = {
        (streams, encrypted): told(load(None, {"streams": streams}), encrypted=encrypted).streams
        for streams in ("auto", "socket", "ray")
        for encrypted in (False, True)
    }
    assert [pair for pair, streams in chosen.items() if streams == "socket"] == [
        ("auto", False),
        ("socket", False),
        ("socket", True),
    ]


@pytest.mark.parametrize("several", [False, True])
def test_every_group_setting_comes_from_a_key(several: bool) -> None:
    """A key that is set must arrive: change each one that a group knows and look at what it is told."""
    given = {"models": [{"model": "other"}, {"model": "m", **PER_MODEL}]} if several else PER_MODEL
    settings = told(ClusterConfig.model_validate({**given, **PER_SERVICE}), model=int(several))
    wanted = PER_MODEL | PER_SERVICE
    assert {key: getattr(settings, key) for key in wanted} == wanted
    untold = {"model_dir", "model_names", "revision", "device", "memory_fraction", "native_dir", "checks_dir"}
    assert untold | set(wanted) == set(GroupSettings.__slots__), "a field that no key reaches"


def test_every_ingress_setting_comes_from_a_key(tmp_path: Path) -> None:
    text = {
        "service_name": "s",
        "namespace_secret_file": ["/a", "/b"],
        "api_keys_file": "/k",
        "public_prompts_file": "/p",
        "cache_scope": "session",
        "session_ttl_s": 1.0,
        "body_limit": 2,
        "drain_s": 3.0,
        "request_timeout_s": 4.0,
        "stream_comment_s": 5.0,
        "max_logprobs": 9,
        "session_blocks": 6,
        "tenant_blocks": 7,
        "max_keep_alive_s": 8.0,
        "models": [{"model": "x", "max_model_len": 9}, {"model": "y", "served_model_names": ["z", "zz"]}],
    }
    config = ClusterConfig.model_validate(text)
    settings = ingress_settings(config, [Path("/x"), Path("/y")], ["rx", "ry"], Environment(tmp_path))
    told_values = (settings.service, settings.secret_files, settings.keys_file, settings.public_file)
    assert told_values == ("s", ("/a", "/b"), "/k", "/p")
    values = (settings.cache_scope, settings.session_ttl_s, settings.body_limit, settings.drain_s, settings.timeout_s)
    assert values == ("session", 1.0, 2, 3.0, 4.0)
    rest = (settings.comment_s, settings.session_blocks, settings.tenant_blocks, settings.max_keep_s)
    assert rest == (5.0, 6, 7, 8.0)
    assert settings.max_logprobs == 9
    assert [(m.folder, m.names, m.revision, m.max_model_len) for m in settings.models] == [
        ("/x", ("x",), "rx", 9),
        ("/y", ("z", "zz"), "ry", None),
    ]
    default = IngressSettings(settings.models)
    same = [name for name in IngressSettings.__slots__ if getattr(settings, name) == getattr(default, name)]
    assert same == ["models"], "a field that no key reaches"


def test_line_and_ladder_reach_the_coordinator(write) -> None:
    line = {"requests": 3, "tokens": 4, "aging_s": 5.0, "batch_s": 6.0, "bypasses": 0, "bypass_s": 8.0}
    ladder = {"trim_up": 0.5, "trim_down": 0.4, "shrink_up": 1.5, "shrink_down": 1.4, "refuse_up": 0.6}
    ladder |= {"refuse_down": 0.5, "dwell_up_s": 0.0, "dwell_down_s": 1.0}
    settings = coordinator_settings(load(write(yaml.safe_dump({"line": line, "ladder": ladder}))), "id")
    assert (settings.service, settings.config) == ("tidegate", "id")
    assert settings.terms.line == LineBounds(**line) and settings.terms.ladder == Thresholds(**ladder)
    assert set(ladder) == set(Thresholds.__slots__), "a threshold that no key reaches"


def test_defaults_of_line_and_ladder_are_the_terms_own() -> None:
    assert coordinator_settings(ClusterConfig(), "").terms == CoordinatorTerms()
    assert LineSection().bounds() == LineBounds() and LadderSection().thresholds() == Thresholds()


@pytest.mark.parametrize("text", ["off", "'off'", "{enabled: off}", "false"])
def test_a_ladder_that_is_off_never_goes_up(write, text: str) -> None:
    ladder = load(write(f"ladder: {text}\n")).ladder.thresholds()
    assert min(ladder.trim_up, ladder.shrink_up, ladder.refuse_up) == float("inf")
    assert load(write("ladder: on\n")).ladder.thresholds() == Thresholds()


def test_the_secret_is_named_never_held(tmp_path: Path) -> None:
    outside = Environment(tmp_path, namespace_secret_file="/from/env")

    def secrets(**keys: object) -> tuple[str, ...]:
        config = ClusterConfig.model_validate(keys)
        return ingress_settings(config, [tmp_path], ["r"], outside).secret_files

    assert secrets() == ("/from/env",)
    assert secrets(namespace_secret_file="/from/file") == ("/from/file",)
    assert secrets(namespace_secret_file=["/new", "/old"]) == ("/new", "/old")


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = ClusterConfig(api_keys_file="keys.yaml", namespace_secret_file=("~/s",), flight_dir="flights")
    settings = ingress_settings(config, [tmp_path], ["r"], Environment(tmp_path))
    assert settings.keys_file == str(tmp_path / "keys.yaml")
    assert settings.secret_files == (str(Path.home() / "s"),)
    assert told(config).flight_dir == str(tmp_path / "flights")


KEYS = "tenants: [{name: a, keys: ['sha256:" + "0" * 64 + "']}]"


@pytest.mark.parametrize(
    ("key", "content", "says"),
    [
        ("api_keys_file", None, "cannot be read: No such file or directory"),
        ("api_keys_file", b"", "is empty"),
        ("api_keys_file", b"\xff", "not UTF-8 at byte 0"),
        ("api_keys_file", b"tenants: [{name: a}]", "tenants[0].keys: is required"),
        ("api_keys_file", KEYS.encode(), None),
        ("public_prompts_file", None, "cannot be read: No such file or directory"),
        ("public_prompts_file", b"", "is empty"),
        ("public_prompts_file", b"prompts: []", None),
        ("namespace_secret_file", None, "cannot be read: No such file or directory"),
        ("namespace_secret_file", b"short", "holds 5 bytes; 16 random ones at least"),
        ("namespace_secret_file", bytes(16), None),
    ],
)
def test_a_named_file_that_is_of_no_use_is_told_with_its_key(
    tmp_path: Path, key: str, content: bytes | None, says: str | None
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    config = ClusterConfig.model_validate({key: str(path)})
    faults = file_faults(config, Environment(tmp_path))
    assert faults == [] if says is None else len(faults) == 1
    assert says is None or (faults[0].startswith(f"{key}: {path}") and says in faults[0])


def test_a_secret_named_by_the_environment_is_looked_at_too(tmp_path: Path) -> None:
    (fault,) = file_faults(ClusterConfig(), Environment(tmp_path, str(tmp_path / "absent")))
    assert fault.startswith("namespace_secret_file: ") and "cannot be read" in fault


def test_group_settings_come_back_from_json() -> None:
    """As they travel to a process that Ray does not start."""
    settings = told(ClusterConfig.model_validate({**PER_MODEL, **PER_SERVICE}))
    assert GroupSettings.parse(json.loads(json.dumps(settings.plain))) == settings
