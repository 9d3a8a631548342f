"""The operator's config: what is accepted, what is refused, and that a refusal says where and what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.config import ClusterConfig, ConfigError, Environment, child_environment, is_loopback, load
from deploy.machine import physical_cores, port_fault
from deploy.sections import ModelSection
from deploy.sizes import format_size, parse_size
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "service.yaml"
        path.write_text(text)
        return path

    return to_file


@pytest.mark.parametrize(
    ("text", "size"),
    [("72MiB", 75_497_472), ("1.5GiB", 1_610_612_736), ("2 GB", 2_000_000_000), ("512kib", 524_288), (4096, 4096)],
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["72", "72 Mib s", "MiB", "-1MiB", "1e3MiB", "0MiB", "12parsec", "", 0, -5, True, 1.5, None]
)
def test_sizes_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [format_size(n) for n in (512, 75_497_472, 3 * 2**40)] == ["512 B", "72.0 MiB", "3.0 TiB"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kv_memory: 72Mb5", ["kv_memory", "72MiB"]),
        ("kv_memroy: 72MiB", ["unknown key", "did you mean kv_memory?"]),
        ("tensor_parallel_size: 0", ["tensor_parallel_size", "greater than or equal to 1"]),
        ("tensor_parallel_size: true", ["tensor_parallel_size", "valid integer"]),
        ("tensor_parallel_size: two", ["tensor_parallel_size", "'two'"]),
        ("block_size: 48", ["block_size", "16, 32, 64, 128", "48"]),
        ("block_size: 256", ["block_size", "256"]),
        ("host: 0.0.0.0", ["host", "allow_remote: true"]),
        ("port: 70000", ["port", "65535"]),
        ("dtype: int8", ["dtype", "'int8' is not supported", "auto, bf16, fp16, fp32"]),
        ("kv_precision: fp7", ["kv_precision", "must be one of auto, fp32, bf16", "'fp7'"]),
        ("kv_precision: {default: int8, layers: {x: bf16}}", ["kv_precision", "layers.x", "-3- for the last three"]),
        ("kernels: cuda", ["kernels", "'cuda' is not supported", "auto, native, onednn, torch"]),
        ("kernels: 3", ["kernels", "3 is not supported"]),
        ("weight_precision: int4", ["weight_precision", "'int4' is not supported", "auto, int8"]),
        ("{kernels: onednn, weight_precision: int8}", ["weight_precision", "int8 needs kernels: native"]),
        ("gpu_memory_utilization: 1.2", ["gpu_memory_utilization", "less than or equal to 1"]),
        ("gpu_memory_utilization: .nan", ["gpu_memory_utilization"]),
        ("overlap: 3", ["overlap", "less than or equal to 2"]),
        ("prefix_cache: perhaps", ["prefix_cache", "'perhaps'"]),
        ("max_num_batched_tokens: 16", ["max_num_batched_tokens", "block_size (32)", "16"]),
        ("max_num_seqs: 1000", ["max_num_batched_tokens", "max_num_seqs (1000)", "512"]),
        ("served_model_names: [a, b, a]", ["served_model_names", "twice"]),
        ("cache_scope: global", ["cache_scope", "'tenant'"]),
        ("model: ''", ["model", "at least 1 character"]),
        ("api_keys_file: ''", ["api_keys_file", "at least 1 character"]),
        ("public_prompts_file: 3", ["public_prompts_file", "valid string"]),
        ("namespace_secret_file: [a, b, a]", ["namespace_secret_file", "twice"]),
        ("namespace_secret_file: ['']", ["namespace_secret_file.0", "at least 1 character"]),
        ("session_blocks: 0", ["session_blocks", "greater than or equal to 1"]),
        ("tenant_blocks: -4", ["tenant_blocks", "greater than or equal to 1"]),
        ("max_keep_alive_s: -1", ["max_keep_alive_s", "greater than or equal to 0"]),
        ("request_timeout_s: 0", ["request_timeout_s", "greater than 0"]),
        ("stream_comment_s: .inf", ["stream_comment_s", "86400"]),
        ("step_timeout_s: soon", ["step_timeout_s", "valid number"]),
        ("flight_dir: ''", ["flight_dir", "at least 1 character"]),
        ("line: {requests: 0}", ["line.requests", "greater than or equal to 1"]),
        ("line: {tokens: many}", ["line.tokens", "valid integer"]),
        ("line: {aging_s: 0}", ["line.aging_s", "greater than 0"]),
        ("line: {bypasses: -1}", ["line.bypasses", "greater than or equal to 0"]),
        ("line: {bypass: 1}", ["line.bypass", "unknown key; did you mean bypass"]),
        ("line: 7", ["line", "got 7"]),
        ("ladder: {trim_up: 1.1}", ["ladder.trim_up", "less than or equal to 1"]),
        ("ladder: {trim_down: 0.8}", ["ladder.trim_down", "must be below trim_up (0.8), got 0.8"]),
        ("ladder: {shrink_up: 0.9}", ["ladder.shrink_down", "must be below shrink_up (0.9), got 0.95"]),
        ("ladder: {refuse_down: 0.98}", ["ladder.refuse_down", "must be below refuse_up (0.97)"]),
        ("ladder: {trim_up: 0.99}", ["ladder.refuse_up", "must be at least trim_up (0.99), got 0.97"]),
        ("ladder: {refuse_down: 0.6}", ["ladder.refuse_down", "must be at least trim_down (0.7), got 0.6"]),
        ("ladder: {dwell_up_s: -1}", ["ladder.dwell_up_s", "greater than or equal to 0"]),
        ("ladder: {trim: 1}", ["ladder.trim", "unknown key; did you mean trim_"]),
        ("ladder: maybe", ["ladder", "'maybe'"]),
        ("models: []", ["models", "lists no model"]),
        ("models: smollm2-135m", ["models", "valid tuple"]),
        ("models: [{model: a}, {model: a}]", ["models", "models.1 answers to a, as models.0 does"]),
        ("models: [{model: a}, {model: b, served_model_names: [c, a]}]", ["models.1 answers to a"]),
        ("models: [{model: a, port: 1}]", ["models.0.port", "unknown key"]),
        ("models: [{model: a, grops: 1}]", ["models.0.grops", "did you mean groups?"]),
        ("models: [{model: a}, {model: b, groups: 0}]", ["models.1.groups", "greater than or equal to 1"]),
        ("models: [{model: a, max_num_batched_tokens: 8}]", ["models.0.max_num_batched_tokens", "block_size (32)"]),
    ],
)
def test_a_bad_value_is_refused_with_line_path_and_hint(write, line: str, says: list[str]) -> None:
    path = write(f"# a comment\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    message = str(refused.value)
    assert all(part in message for part in says), message
    if not line.startswith("max_num_seqs"):  # that one shows in a key that the file leaves out
        assert message.startswith(f"{path}:2: ")


def test_a_fault_in_a_section_is_named_by_its_own_line(write) -> None:
    path = write("models:\n  - model: a\n\n  - model: b\n    groups: 0\nline:\n  tokens: 0\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{path}:5: models.1.groups: ") and second.startswith(f"{path}:7: line.tokens: ")


@pytest.mark.parametrize("key", sorted(ModelSection.model_fields))
def test_a_key_of_one_model_beside_several_models_is_refused(write, key: str) -> None:
    values = {"model": "x", "revision": "r", "served_model_names": "n", "dtype": "bf16", "kv_precision": "bf16"}
    values |= {"quality": "off", "kernels": "native", "weight_precision": "int8", "placement": "nodes"}
    values |= {"kv_memory": "1MiB", "prefix_cache": "on", "block_size": "32", "max_num_batched_tokens": "512"}
    path = write(f"models:\n  - model: a\n{key}: {values.get(key, 1)}\n")
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:3: {key}: stands beside models")
    with pytest.raises(ConfigError, match=f"^--{key.replace('_', '-')}: "):
        load(write("models:\n  - model: a\n"), {key: values.get(key, 1)} if key != "block_size" else {key: 32})


def test_every_fault_is_told_at_once(write) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write("overlap: 9\nport: 0\nunheard_of: 1\n"))
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: x\n  port: [\n", ":2: not valid YAML"),
        ("- a\n- b\n", ":1: expected"),
        ("port: 1\nmodel: x\nport: 2\n", ":3: port stands here a second time; it was set on line 1"),
        ("model: !!python/object:os.system x\n", ":1: not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_its_line(write, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("!", "")):
        load(write(text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load(tmp_path / "absent.yaml")


def test_an_option_goes_before_the_file_and_is_blamed_by_its_own_name(write) -> None:
    path = write("port: 9000\ngroups: 2\n")
    config = load(path, {"port": 9001, "groups": None})
    assert (config.port, config.groups) == (9001, 2)
    with pytest.raises(ConfigError, match=r"^--kv-memory: kv_memory: not a size"):
        load(path, {"kv_memory": "much"})


def test_an_empty_file_is_the_defaults(write) -> None:
    assert load(write("")) == load(None) == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "value"), [("on", True), ("off", False), ("'off'", False), ("'on'", True), ("true", True)]
)
def test_the_prefix_cache_is_switched_by_on_and_off(write, text: str, value: bool) -> None:
    assert load(write(f"prefix_cache: {text}\n")).prefix_cache is value


def test_long_dtype_names_mean_the_same(write) -> None:
    config = load(write("dtype: bfloat16\nkv_precision: float32\n"))
    assert (config.dtype, config.kv_precision) == ("bf16", PrecisionMap.uniform(Precision.FP32))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host: 0.0.0.0\n", "allow_remote: true"),
        ("host: 0.0.0.0\napi_keys_file: /keys\n", "allow_remote: true"),
        ("host: 0.0.0.0\nallow_remote: true\n", "set api_keys_file"),
        ("host: '::'\nallow_remote: true\n", "set api_keys_file"),
    ],
)
def test_a_remote_host_needs_both_keys_and_to_be_asked_for(write, text: str, says: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:1: host: ") and says in str(refused.value)


def test_a_remote_host_is_allowed_with_keys_when_asked_for(write) -> None:
    assert load(write("host: 0.0.0.0\nallow_remote: true\napi_keys_file: /keys\n")).host == "0.0.0.0"
    assert [is_loopback(h) for h in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "0.0.0.0", "::", "example")] == [
        *[True] * 4,
        *[False] * 3,
    ]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        ClusterConfig().port = 1  # type: ignore[misc]


def test_names_default_to_the_models_own(tmp_path: Path) -> None:
    assert ClusterConfig().names == ("smollm2-135m",)
    assert ClusterConfig(model="org/name").names == ("org/name",)
    assert ClusterConfig(model=str(tmp_path / "mine")).names == ("mine",)
    assert load(None, {"served_model_names": "x"}).names == ("x",)


def test_the_environment_is_read_in_one_place() -> None:
    assert Environment.read({"TIDEGATE_CACHE": "/c", "TIDEGATE_NAMESPACE_SECRET_FILE": "/s"}) == Environment(
        Path("/c"), "/s"
    )
    assert Environment.read({}).cache == Path("~/.cache/tidegate").expanduser()
    assert [Environment.read({"RAY_USE_TLS": value}).encrypted for value in ("1", "true", "0")] == [True, True, False]
    assert not Environment.read({}).encrypted
    assert child_environment(TIDEGATE_X="1")["TIDEGATE_X"] == "1"


def test_the_shipped_configs_are_valid() -> None:
    cpu = load(ROOT / "deploy" / "configs" / "cpu.yaml")
    assert (cpu.device, cpu.host, cpu.port) == ("cpu", "127.0.0.1", 8000)
    serve = yaml.safe_load((ROOT / "deploy" / "configs" / "serve.yaml").read_text())
    (application,) = serve["applications"]
    assert application["import_path"] == "deploy.app:build"
    assert ClusterConfig.model_validate(application["args"]).model == "smollm2-135m"
    assert is_loopback(serve["http_options"]["host"])


def test_the_serve_config_passes_serves_own_schema() -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "deploy" / "configs" / "serve.yaml").read_text()))


def test_cores_count_once_per_core_and_within_the_quota(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(range(4), tmp_path, tmp_path) == 2
    assert physical_cores([1, 3], tmp_path, tmp_path) == 1
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert physical_cores(range(4), tmp_path, tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert physical_cores(range(4), tmp_path, tmp_path) == 2
    assert physical_cores() >= 1


def test_a_taken_port_is_told() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fault = port_fault("127.0.0.1", port)
        assert fault and f"127.0.0.1:{port}" in fault and "--port" in fault
    assert port_fault("127.0.0.1", port) is None


def test_ranks_are_on_one_node_unless_they_may_be_on_several(write) -> None:
    assert load(write("model: a\n")).placement == "node"
    several = load(write("models:\n  - {model: a, placement: nodes}\n  - {model: b}\n"))
    assert [section.placement for section in several.sections] == ["nodes", "node"]
    with pytest.raises(ConfigError, match=r":1: placement: input should be 'node' or 'nodes', got 'anywhere'"):
        load(write("placement: anywhere\n"))
