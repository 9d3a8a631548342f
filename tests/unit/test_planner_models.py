"""Shapes from config.json files of many families, the table's names, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.plan.modelconfig import read_shape, shape_of
from deploy.plan.modeltable import find, unknown
from deploy.staging import ModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def windows(config: Mapping[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in shape_of(config, "it").layers]


def heads(config: Mapping[str, Any]) -> tuple[str, int, int]:
    attention = shape_of(config, "it").layers[0].attention
    return attention.kind, attention.kv_heads, attention.head_dim


def test_fields_of_many_families() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}
    falcon = {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65_024,
        "parallel_attn": True,
    }
    newer = falcon | {
        "new_decoder_architecture": True,
        "num_attention_heads": 64,
        "num_kv_heads": 8,
        "hidden_size": 4096,
    }
    assert heads(LLAMA) == ("GQA", 2, 16)
    assert heads(gpt2) == ("MHA", 12, 64)
    assert heads(gpt2 | {"model_type": "gpt_bigcode"}) == ("MQA", 1, 64)
    assert heads(falcon) == ("MQA", 1, 64)
    assert heads(newer) == ("GQA", 8, 64)
    assert shape_of(gpt2, "gpt2").elements.total == 124_439_808


def test_windows_by_layer() -> None:
    gemma3 = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8, "head_dim": 16}
    qwen2 = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 4}
    assert windows(LLAMA | {"model_type": "gemma2", "sliding_window": 8, "head_dim": 16}) == [8, None] * 3
    assert windows(gemma3) == [8] * 5 + [None]
    assert windows(qwen2) == [None] * 6
    assert windows(qwen2 | {"use_sliding_window": True}) == [None] * 4 + [8] * 2
    assert windows(LLAMA | {"model_type": "mistral", "sliding_window": None}) == [None] * 6
    assert windows(LLAMA | {"model_type": "mistral"}) == [4096] * 6
    kinds = ["full_attention", "sliding_attention"] * 3
    assert windows(LLAMA | {"sliding_window": 8, "layer_types": kinds}) == [None, 8] * 3


def test_a_decoder_inside_another_model() -> None:
    inner = {key: value for key, value in LLAMA.items() if not key.startswith("num_att")} | {
        "model_type": "gemma3_text"
    }
    found = shape_of({"model_type": "gemma3", "torch_dtype": "float16", "text_config": inner}, "it")
    assert (found.layers[0].attention.q_heads, found.dtype, found.tied) == (8, "fp16", True)


def test_experts() -> None:
    found = find("deepseek-v2")
    assert found is not None
    assert [layer.mlp.experts for layer in found.layers] == [0] + [160] * 59
    assert found.layers[1].mlp.shared == 2 * 1536
    assert found.expert_elements == 59 * 160 * 3 * 5120 * 1536
    sparse = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert [layer.mlp.experts for layer in shape_of(sparse, "it").layers] == [0, 0, 0, 4, 0, 4]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_would_be_guessed_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        shape_of(LLAMA | change, "it")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_shape(path, "it")
    path.write_text(json.dumps(LLAMA))
    assert read_shape(path, "it").name == "it"


@pytest.mark.parametrize("name", ["Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b-chat"])
def test_names_as_hubs_write_them(name: str) -> None:
    found = find(name)
    assert found is not None and found.name == "llama-3-70b"


def test_an_unknown_name_says_what_is_near() -> None:
    assert find("llama-4-70b") is None
    assert "did you mean" in str(unknown("llama-4-70b"))
