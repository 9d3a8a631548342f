"""ModelSpec: what config.json means, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from workers.models.parts import Residual
from workers.models.reading import parse_native, read_native
from workers.models.spec import Unsupported

BF16 = PrecisionMap.uniform(Precision.BF16)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}

GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
GEMMA3 = GEMMA2 | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 1024, "query_pre_attn_scalar": 168}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "sliding_window": 2047,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 12}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "vocab_size": 50432,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
}


def test_fields_of_a_llama() -> None:
    spec = parse_native(LLAMA, {"eos_token_id": [2, 7]})
    assert (spec.q_heads, spec.kv_heads, spec.head_dim, spec.layers) == (9, 3, 64, 30)
    assert (spec.norm_eps, spec.tie_embeddings, spec.dtype) == (1e-5, True, "bfloat16")
    assert (spec.eos_ids, spec.bos_id) == ((2, 7), 1)
    assert spec.rope.theta == 100000.0
    assert not (spec.qkv_bias or spec.output_bias or spec.mlp_bias or spec.qk_norm)


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, GEMMA3, PHI3, GPT2, NEOX, FALCON])
def test_every_family_takes_ids_of_both_files_and_the_dtype_by_either_name(config: dict[str, Any]) -> None:
    said = {"eos_token_id": [5, 7], "bos_token_id": 3, "torch_dtype": "torch.float16"}
    spec = parse_native(config | said, {"eos_token_id": [7, 9]})
    assert (spec.eos_ids, spec.bos_id, spec.dtype) == ((5, 7, 9), 3, "float16")
    assert parse_native(config | said | {"dtype": "bfloat16"}).dtype == "bfloat16"
    silent = parse_native({field: value for field, value in config.items() if field not in said})
    assert (silent.eos_ids, silent.bos_id, silent.dtype) == ((), None, "float32")


@pytest.mark.parametrize("config", [LLAMA, PHI3, NEOX], ids=["llama", "phi3", "neox"])
@pytest.mark.parametrize(
    ("field", "attribute"),
    [
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_hidden_layers", "layers"),
        ("num_attention_heads", "q_heads"),
    ],
)
def test_a_size_is_what_its_field_says_and_has_no_default(config: dict[str, Any], field: str, attribute: str) -> None:
    assert getattr(parse_native(config), attribute) == config[field]
    with pytest.raises(Unsupported, match=f"{field} must be an integer of at least 1, got None"):
        parse_native({name: value for name, value in config.items() if name != field})


@pytest.mark.parametrize(
    ("config", "biases", "qk_norm", "head_dim"),
    [
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True), False, 64),
        (MISTRAL | {"attention_bias": True, "head_dim": 96}, (False, False, False), False, 96),
        (QWEN2 | {"attention_bias": False}, (True, False, False), False, 64),
        (QWEN3, (True, True, False), True, 128),
        (QWEN3 | {"attention_bias": False, "head_dim": 64}, (False, False, False), True, 64),
    ],
)
def test_families_differ_in_biases_norms_and_head_dim(
    config: dict[str, Any], biases: tuple[bool, bool, bool], qk_norm: bool, head_dim: int
) -> None:
    spec = parse_native(config)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == biases
    assert spec.qk_norm is qk_norm
    assert spec.head_dim == head_dim


def test_a_gemma_has_windows_caps_and_ropes_of_its_own() -> None:
    two, three = parse_native(GEMMA2), parse_native(GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert two.windows == (4096, None) * 13 and three.windows[:7] == (1024,) * 5 + (None, 1024)
    assert (two.softcap, two.logit_softcap, two.scale) == (50.0, 30.0, 1 / 16)
    assert (three.softcap, three.logit_softcap, three.scale) == (None, None, 168**-0.5)
    assert [(rope.kind, rope.theta) for rope in three.ropes] == [("linear", 1e6), ("default", 1e4)]
    assert [three.rope_of(layer) for layer in (0, 5)] == [1, 0]
    assert three.context_length == 131_072, "its positions are stretched already"
    assert (two.embedding_scale, two.activation, two.residual) == (48.0, "gelu_tanh", Residual.SANDWICH)


def test_longrope_is_served_up_to_its_original_length() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    spec = parse_native(PHI3 | {"rope_scaling": rope, "original_max_position_embeddings": 4096})
    assert spec.context_length == 4096
    assert spec.ropes[0].attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)
    assert spec.windows[0] == 2047


@pytest.mark.parametrize(
    ("changes", "kv_heads", "residual"),
    [
        ({}, 1, Residual.SHARED),
        ({"multi_query": False, "parallel_attn": False}, 71, Residual.SEQUENTIAL),
        ({"new_decoder_architecture": True, "num_kv_heads": 71}, 71, Residual.PARALLEL),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 71, Residual.SHARED),
    ],
)
def test_falcon_in_its_layouts(changes: dict[str, Any], kv_heads: int, residual: Residual) -> None:
    spec = parse_native(FALCON | changes)
    assert (spec.kv_heads, spec.residual, spec.gated, spec.tie_embeddings) == (kv_heads, residual, False, True)


def test_older_names_of_a_neox() -> None:
    spec = parse_native(NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500})
    assert (spec.ropes[0].share, spec.ropes[0].theta, spec.ropes[0].rotated(64)) == (0.5, 500.0, 32)
    assert parse_native(NEOX).ropes[0].rotated(64) == 16


def test_layout_gives_the_table_s_bytes_and_splits_heads_unevenly() -> None:
    spec = parse_native(LLAMA)
    assert spec.layout(16, BF16, 1)[0].token_bytes == 23_040
    assert [layout.token_bytes for layout in spec.layout(16, BF16, 2)] == [15_360, 7_680]
    assert [layout.layers[0].heads for layout in spec.layout(16, BF16, 9)] == [1] * 9
    with pytest.raises(ValueError, match="10"):
        spec.layout(16, BF16, 10)


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_every_spelling_of_a_rope_means_the_same(kind: str) -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    spellings = [
        LLAMA | {"rope_scaling": {"type": kind} | SCALED},
        LLAMA | {"rope_scaling": {"rope_type": kind} | SCALED},
        bare | {"rope_parameters": {"rope_type": kind, "rope_theta": 100000.0} | SCALED},
        bare | {"rope_parameters": {"full_attention": {"rope_type": kind, "rope_theta": 100000.0} | SCALED}},
    ]
    ropes = {parse_native(config).rope for config in spellings}
    assert len(ropes) == 1
    rope = ropes.pop()
    assert (rope.kind, rope.theta, rope.factor) == (kind, 100000.0, 8.0)
    assert rope.original_length == (1024 if kind in ("llama3", "yarn") else 8192)
    assert (rope.attention_factor > 1) is (kind == "yarn")


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        (None, 8192),
        ({"rope_type": "default"}, 8192),
        ({"type": "linear", "factor": 2}, 16384),
        ({"type": "dynamic", "factor": 4.0}, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "original_max_position_embeddings": 4096}, 8192),
        ({"rope_type": "llama3"} | SCALED, 8192),
    ],
)
def test_context_reaches_as_far_as_the_rope_stretches_it(rope: dict[str, Any] | None, reach: int) -> None:
    assert parse_native(LLAMA | {"rope_scaling": rope}).context_length == reach


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL,
        MISTRAL | {"sliding_window": 8192},
        QWEN2,
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 30},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 30},
        QWEN3 | {"sliding_window": None, "use_sliding_window": True},
        LLAMA | {"partial_rotary_factor": 1.0, "quantization_config": None, "num_local_experts": 0},
    ],
)
def test_a_window_that_is_off_or_reaches_everything_is_none(config: dict[str, Any]) -> None:
    assert parse_native(config).windows == (None,) * 30


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 512}, (512,) * 30),
        ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, (4096,) * 30),
        (MISTRAL | {"sliding_window": 8192, "rope_scaling": {"type": "linear", "factor": 2}}, (8192,) * 30),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 28}, (None,) * 28 + (4096,) * 2),
        (
            QWEN3 | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 15},
            (4096, None) * 15,
        ),
    ],
)
def test_windows_are_those_of_each_layer(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = parse_native(config)
    assert spec.windows == windows
    assert tuple(layer.window for layer in spec.layout(16, BF16, 1)[0].layers) == windows


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        (LLAMA | {"architectures": None}, "architecture"),
        (LLAMA | {"sliding_window": 512}, "sliding_window"),
        (QWEN3 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 29}, "layer_types"),
        (QWEN3 | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 30}, "chunked_attention"),
        (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor"),
        (LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA | {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "sliding_attention"),
        (LLAMA | {"num_attention_heads": 8}, "num_key_value_heads"),
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size"),
        (LLAMA | {"head_dim": 63}, "head_dim 63"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM .* ALiBi"),
        (FALCON | {"alibi": True}, "alibi"),
        (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"activation_function": "relu"}, "activation_function 'relu'"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (NEOX | {"rotary_pct": 0.05}, "partial_rotary_factor"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
    ],
)
def test_what_would_be_served_wrong_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        parse_native(config)


def test_read_takes_both_files_and_explains_a_folder_without_them(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"config\.json"):
        read_native(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_native(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert read_native(tmp_path).eos_ids == (2, 3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Unsupported, match="not JSON"):
        read_native(tmp_path)
