"""How far each config key reaches: every key has one class, and differences say what each takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.changes import REACH, Reach, beyond_live, differences
from deploy.config import ClusterConfig
from deploy.settings import digest_of, source_of


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the config, those of parts behind their part's."""
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            yield from keys_of(type(default), f"{name}.")
        else:
            yield prefix + name


def test_every_key_has_exactly_one_class_and_no_class_is_of_nothing() -> None:
    keys = list(keys_of(ClusterConfig))
    assert len(keys) == len(set(keys))
    assert set(keys) == set(REACH)


def test_each_difference_says_what_it_takes() -> None:
    old = ClusterConfig(model="a", kv_memory="1MiB")
    new = ClusterConfig.model_validate(
        {
            "model": "a",
            "kv_memory": "2MiB",
            "line": {"requests": 5},
            "ladder": "off",
            "port": 9000,
            "cache_scope": "tenant",
        }
    )
    found = {change.key: (change.before, change.after, change.reach) for change in differences(old, new)}
    assert found == {
        "kv_memory": (2**20, 2**21, Reach.ROLLING),
        "line.requests": (1024, 5, Reach.LIVE),
        "ladder.enabled": (True, False, Reach.LIVE),
        "port": (8000, 9000, Reach.NEW),
        "cache_scope": ("auto", "tenant", Reach.LIVE),
    }
    assert {change.key for change in beyond_live(differences(old, new))} == {"kv_memory", "port"}
    assert differences(new, new) == ()


@pytest.mark.parametrize(
    ("old", "new", "built", "reach"),
    [(64, 32, None, Reach.LIVE), (32, 64, None, Reach.ROLLING), (32, 64, 64, Reach.LIVE), (32, 65, 64, Reach.ROLLING)],
)
def test_a_limit_is_live_up_to_what_the_groups_were_built_with(
    old: int, new: int, built: int | None, reach: Reach
) -> None:
    configs = [ClusterConfig(max_num_seqs=seqs) for seqs in (old, new)]
    base = ClusterConfig(max_num_seqs=built) if built else None
    assert [change.reach for change in differences(*configs, base)] == [reach]


def test_models_are_compared_by_their_names() -> None:
    def config(*models: dict[str, object]) -> ClusterConfig:
        return ClusterConfig.model_validate({"models": list(models)})

    one, two = {"model": "one"}, {"model": "two"}
    found = differences(config(one, two), config(one, two | {"prefix_cache": False, "overlap": 2}))
    assert [(change.key, change.reach) for change in found] == [
        ("models.1.prefix_cache", Reach.LIVE),
        ("models.1.overlap", Reach.ROLLING),
    ]
    [change] = differences(config(one, two), config(two))
    assert (change.key, change.before, change.after, change.reach) == ("models", ["one", "two"], ["two"], Reach.NEW)


def test_a_map_of_precisions_is_one_value() -> None:
    old, new = ClusterConfig(), ClusterConfig.model_validate({"kv_precision": {"k": "int8", "v": "int4"}})
    [change] = differences(old, new)
    assert (change.key, change.reach) == ("kv_precision", Reach.ROLLING)


def test_a_config_comes_back_from_its_source_and_spelling_does_not_change_its_digest() -> None:
    config = ClusterConfig.model_validate(
        {
            "models": [{"model": "a", "kv_precision": {"k": "int8", "v": "int4"}}],
            "ladder": {"trim_up": 0.7, "trim_down": 0.6},
        }
    )
    again = ClusterConfig.model_validate_json(source_of(config))
    assert again == config and not differences(config, again)
    assert digest_of(ClusterConfig(port=8000)) == digest_of(ClusterConfig()) != digest_of(ClusterConfig(port=8001))


def test_diff_prints_what_each_key_takes(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("session_ttl_s: 300\nblock_size: 32\n")
    new.write_text("session_ttl_s: 60\nblock_size: 64\nport: 8001\n")
    done = CliRunner().invoke(cli, ["config", "diff", str(old), str(new), "--json"])
    assert done.exit_code == 0, done.output
    found = {change["key"]: change["reach"] for change in json.loads(done.stdout)["changes"]}
    assert found == {"session_ttl_s": "live", "block_size": "one group at a time", "port": "new cluster"}
    shown = CliRunner().invoke(cli, ["config", "diff", str(old), str(new)]).stdout
    assert "one group at a time" in shown and "new cluster" in shown
    assert "nothing changes" in CliRunner().invoke(cli, ["config", "diff", str(old), str(old)]).stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text("sessions_ttl: 3\n")
    refused = CliRunner().invoke(cli, ["config", "diff", str(old), str(bad)])
    assert refused.exit_code == 1
