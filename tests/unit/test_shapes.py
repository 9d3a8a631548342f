"""What config.json says of MLA, of experts and of weight formats, and what of it is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from workers.models.reading import parse_native
from workers.models.shapes import LatentShape, Routing, Scoring
from workers.models.spec import Unsupported

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 8,
    "topk_group": 3,
    "num_experts_per_tok": 6,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 16.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 60,
}
MINICPM3: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "vocab_size": 73_448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "max_position_embeddings": 32_768,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 32_768,
    },
}
MOE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXTRAL = MOE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = MOE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "use_sliding_window": False,
    "sliding_window": None,
}


def test_deepseek_v3_as_published() -> None:
    spec = parse_native(V3)
    assert spec.latent == LatentShape(512, 64, 128, 128, 1536, interleaved=True)
    assert (spec.head_dim, spec.value_dim, spec.rotary_dim, spec.context_length) == (192, 128, 64, 163_840)
    assert spec.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec.rope is not None and spec.rope.attention_factor == 1.0
    assert spec.experts is not None
    assert spec.experts.routing == Routing(8, Scoring.SIGMOID, True, 2.5, 8, 4, 2, corrected=True)
    assert (spec.experts.experts, spec.experts.columns, spec.experts.shared) == (256, 2048, 2048)
    assert [spec.is_sparse(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert (spec.unused_layers, spec.fp8_block) == (1, (128, 128))


def test_deepseek_v2_as_published() -> None:
    spec = parse_native(V2)
    assert spec.experts is not None
    assert spec.experts.routing == Routing(6, Scoring.SOFTMAX, False, 16.0, 8, 3, 1)
    assert (spec.experts.shared, spec.unused_layers) == (3072, 0)
    greedy = parse_native(V2 | {"topk_method": "greedy", "q_lora_rank": None, "moe_layer_freq": 2})
    assert greedy.experts is not None and greedy.experts.routing.groups == 1
    assert greedy.experts.sparse[:6] == (False, False, True, False, True, False)
    assert greedy.latent is not None and greedy.latent.q_rank is None
    assert parse_native(V2 | {"n_routed_experts": None}).experts is None


def test_minicpm3_as_published() -> None:
    spec = parse_native(MINICPM3)
    assert spec.latent == LatentShape(256, 32, 64, 64, 768, interleaved=False)
    assert (spec.embedding_scale, spec.final_scale, spec.tie_embeddings) == (12, 0.1, True)
    assert spec.branch_scale == pytest.approx(1.4 / 62**0.5)
    neutral = parse_native(MINICPM3 | {"scale_depth": None, "dim_model_base": None, "scale_emb": 1})
    assert (neutral.branch_scale, neutral.final_scale, neutral.embedding_scale) == (1, 1, 1)


def test_every_rank_keeps_the_whole_latent_and_its_rotated_part_stays_in_16_bits() -> None:
    spec = parse_native(V3)
    for label, size in {"bf16": 1152, "int8": 512 + 4 + 128, "int4": 256 + 4 + 128, "fp32": 2304}.items():
        layouts = spec.layout(64, PrecisionMap.parse({"k": label, "v": "bf16"}), 3)
        assert [layout.token_bytes for layout in layouts] == [61 * size] * 3
    mixed = spec.layout(64, PrecisionMap.parse({"default": "int8", "layers": {"0": "fp16"}}), 1)[0]
    assert [layer.token_bytes for layer in mixed.layers[:2]] == [1152, 644]
    assert mixed.layers[0].vectors[1].precision is Precision.FP16


def test_experts_of_mixtral_and_qwen() -> None:
    mixtral, qwen = parse_native(MIXTRAL), parse_native(QWEN3)
    assert mixtral.experts is not None and qwen.experts is not None
    assert (mixtral.experts.columns, mixtral.experts.routing) == (14_336, Routing(2))
    assert mixtral.rope is not None and mixtral.rope.theta == 1e6
    assert (qwen.experts.columns, qwen.experts.routing, qwen.qk_norm) == (768, Routing(8), True)
    some = parse_native(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False})
    assert some.experts is not None and not some.experts.routing.normalised
    assert [layer for layer in range(8) if some.is_sparse(layer)] == [1, 5, 7]
    windowed = parse_native(MIXTRAL | {"sliding_window": 4096})
    assert windowed.windows == (4096,) * 8


ADVICE = r"is not supported; use the model in bf16"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        *(
            (MIXTRAL | {"quantization_config": {"quant_method": method, "bits": 4}}, f"'{method}' .*{ADVICE}")
            for method in ("awq", "gptq", "compressed-tensors", "bitsandbytes", "mxfp4")
        ),
        (V3 | {"quantization_config": {"quant_method": "fp8"}}, rf"weight_block_size None .*{ADVICE}"),
        (V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        (V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "weight_block_size"),
        (V3 | {"quantization_config": V3["quantization_config"] | {"fmt": "e5m2"}}, "'e5m2'"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func"),
        (V3 | {"topk_method": "greedy"}, "topk_method"),
        (V3 | {"n_group": 7}, "n_group"),
        (V3 | {"n_group": 256, "topk_group": 4}, "num_experts_per_tok 8"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (V3 | {"kv_lora_rank": None}, "kv_lora_rank"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2 | {"mlp_bias": True}, "mlp_bias"),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ],
)
def test_what_would_be_served_wrong_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        parse_native(config)
