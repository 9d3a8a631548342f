"""Which checkpoints' KV heads can be pooled, and what is said of the others. No model is built: headers suffice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deploy.upcycle.kvheads import INDEX, SINGLE, KVHeads, UpcyclingError
from kvstore.layout import Precision

DIM, HIDDEN, LAYERS = 4, 24, 2
Q_HEADS, KV_HEADS = 6, 6


def config(**changes: Any) -> dict[str, Any]:
    made = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_attention_heads": Q_HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
    }
    return {key: value for key, value in (made | changes).items() if value is not None}


def tensors(kv_heads: int = KV_HEADS, kind: Any = np.float32) -> dict[str, Any]:
    made: dict[str, Any] = {"model.embed_tokens.weight": np.zeros((7, HIDDEN), kind)}
    for layer in range(LAYERS):
        for name, heads in (("q", Q_HEADS), ("k", kv_heads), ("v", kv_heads)):
            made[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = np.zeros((heads * DIM, HIDDEN), kind)
    return made


def folder_of(path: Path, settings: dict[str, Any] | None = None, weights: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config() if settings is None else settings))
    save_file(tensors() if weights is None else weights, path / SINGLE)
    return path


def refusal(folder: Path) -> str:
    with pytest.raises(UpcyclingError) as caught:
        KVHeads.read(folder)
    return str(caught.value)


def test_heads_are_read_from_the_weights_where_the_config_is_silent(tmp_path: Path) -> None:
    silent = config(architectures=["MistralForCausalLM"], num_key_value_heads=None)
    heads = KVHeads.read(folder_of(tmp_path, silent, tensors(kv_heads=3)))
    assert (heads.q_heads, heads.kv_heads, heads.head_dim, heads.layers) == (6, 3, DIM, LAYERS)
    assert heads.precision is Precision.FP32 and heads.shards == (SINGLE,)
    assert len(heads.projections) == 2 * LAYERS and not any("q_proj" in name for name in heads.projections)


def test_bytes_per_token_are_two_vectors_per_head_and_layer(tmp_path: Path) -> None:
    heads = KVHeads.read(folder_of(tmp_path))
    assert heads.token_bytes() == 2 * KV_HEADS * DIM * 4 * LAYERS
    assert heads.token_bytes(2) * 3 == heads.token_bytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM cannot be upcycled: it normalises each key head"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "the norm scales it up again"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "config field use_qk_norm"),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, "config field qk_layernorm"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "no KV heads to pool"),
        ({"architectures": ["NewForCausalLM"], "kv_lora_rank": 512}, "NewForCausalLM cannot be upcycled (config field"),
        ({"architectures": ["Phi3ForCausalLM"]}, "one fused tensor"),
        ({"architectures": ["OPTForCausalLM"]}, "has no num_key_value_heads"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not known here; known: Llama"),
        ({"architectures": None}, "architecture (none) is not known here"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised (awq)"),
        ({"num_key_value_heads": 2}, "says num_key_value_heads 2, the weights have 6"),
        ({"num_hidden_layers": 3}, "says 3 layers, the weights have q_proj, k_proj and v_proj of 2"),
        ({"num_attention_heads": "six"}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": 5}, "do not hold equal heads"),
    ],
)
def test_what_a_config_is_refused_for(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(folder_of(tmp_path, config(**changes)))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.0.self_attn.k_norm.weight", "normalises each key head"),
        ("model.layers.0.self_attn.k_layernorm.norms.0.weight", "normalises each key head"),
        ("model.layers.0.self_attn.qkv_proj.weight", "one fused tensor"),
        ("transformer.h.0.attn.c_attn.weight", "one fused tensor"),
    ],
)
def test_what_a_tensor_is_refused_for(tmp_path: Path, name: str, says: str) -> None:
    said = refusal(folder_of(tmp_path, weights=tensors() | {name: np.zeros(4, np.float32)}))
    assert says in said and name in said


def test_layers_with_different_heads_are_refused(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.1.self_attn.k_proj.weight"] = weights["model.layers.1.self_attn.k_proj.weight"][:DIM]
    assert "equal heads in equal numbers" in refusal(folder_of(tmp_path, weights=weights))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    assert "weight format I8: quantised or unknown" in refusal(folder_of(tmp_path, weights=tensors(kind=np.int8)))


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.1.self_attn.k_proj.weight"] = np.zeros((KV_HEADS * DIM, HIDDEN), np.float16)
    assert "mix weight formats (F16, F32)" in refusal(folder_of(tmp_path, weights=weights))


def test_files_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    assert "config.json cannot be read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert "save the model as safetensors first" in refusal(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"\x40\0\0\0\0\0\0\0{")
    assert "is not a whole safetensors file" in refusal(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    assert "has no weight_map" in refusal(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "has no ../other.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (0, "there must be at least 1"),
        (4, "6 heads do not divide into so many equal groups; possible: 1, 2, 3, 6"),
        (12, "the model has fewer already, 6 for 6 query heads"),
    ],
)
def test_numbers_that_cannot_be_say_which_can(tmp_path: Path, target: int, says: str) -> None:
    heads = KVHeads.read(folder_of(tmp_path))
    for possible in (1, 2, 3, 6):
        heads.check(possible)
    with pytest.raises(UpcyclingError) as caught:
        heads.check(target)
    assert says in str(caught.value)
