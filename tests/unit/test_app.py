"""What `tidegate serve` refuses before it starts anything, and what it says when a start failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import app
from deploy.config import ClusterConfig, ConfigError
from tests.ray.stage import free_port

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
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], keys: dict[str, object], said: str
) -> None:
    config = ClusterConfig(model=str(tmp_path), port=free_port(), **keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        app.run(config, model(tmp_path, **fields), print)


def test_what_can_be_served_goes_on_to_start_ray(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Ray was started"):
        app.run(ClusterConfig(model=str(tmp_path), port=free_port()), model(tmp_path), print)
