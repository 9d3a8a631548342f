"""The models that people plan with, by name: their sizes, as abbreviated config.json files. Knows no weights.

A name with `-mha` or `-mqa` behind it is the same model as if it had as many KV heads as query heads, or one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from deploy.plan.modelconfig import shape_of
from deploy.plan.shapes import ModelShape
from deploy.staging import ModelError

_PREFIXES = ("meta-",)
_SUFFIXES = ("-instruct", "-chat", "-it", "-hf", "-base")
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def _model(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, context: int, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


_DEEPSEEK_V2 = _model(
    "deepseek_v2", 60, 5120, 128, 128, 12_288, 102_400, 163_840, **_MLA, q_lora_rank=1536, moe_intermediate_size=1536,
    n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
)  # fmt: skip
_DEEPSEEK_V2_LITE = _model(
    "deepseek_v2", 27, 2048, 16, 16, 10_944, 102_400, 163_840, **_MLA, moe_intermediate_size=1408,
    n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
)  # fmt: skip
_DEEPSEEK_V3 = _model(
    "deepseek_v3", 61, 7168, 128, 128, 18_432, 129_280, 163_840, **_MLA, q_lora_rank=1536, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
)  # fmt: skip
_QWEN3_30B = _model(
    "qwen3_moe", 48, 2048, 32, 4, 6144, 151_936, 40_960, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768,
)  # fmt: skip
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _model("llama", 30, 576, 9, 3, 1536, 49_152, 8192, head_dim=64, tie_word_embeddings=True),
    "llama-2-7b": _model("llama", 32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama-2-13b": _model("llama", 40, 5120, 40, 40, 13_824, 32_000, 4096),
    "llama-2-70b": _model("llama", 80, 8192, 64, 8, 28_672, 32_000, 4096),
    "llama-3-8b": _model("llama", 32, 4096, 32, 8, 14_336, 128_256, 8192),
    "llama-3-70b": _model("llama", 80, 8192, 64, 8, 28_672, 128_256, 8192),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14_336, 128_256, 131_072),
    "llama-3.1-70b": _model("llama", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
    "llama-3.1-405b": _model("llama", 126, 16_384, 128, 8, 53_248, 128_256, 131_072),
    "llama-3.2-1b": _model("llama", 16, 2048, 32, 8, 8192, 128_256, 131_072, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128_256, 131_072, head_dim=128, tie_word_embeddings=True),
    "llama-3.3-70b": _model("llama", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14_336, 32_768, 32_768, sliding_window=None),
    "mistral-7b-v0.1": _model("mistral", 32, 4096, 32, 8, 14_336, 32_000, 32_768, sliding_window=4096),
    "mixtral-8x7b": _model("mixtral", 32, 4096, 32, 8, 14_336, 32_000, 32_768, **_MIXTRAL),
    "mixtral-8x22b": _model("mixtral", 56, 6144, 48, 8, 16_384, 32_768, 65_536, **_MIXTRAL),
    "qwen2-7b": _model("qwen2", 28, 3584, 28, 4, 18_944, 152_064, 32_768),
    "qwen2-72b": _model("qwen2", 80, 8192, 64, 8, 29_568, 152_064, 32_768),
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 18_944, 152_064, 32_768),
    "qwen2.5-72b": _model("qwen2", 80, 8192, 64, 8, 29_568, 152_064, 32_768),
    "qwen3-8b": _model("qwen3", 36, 4096, 32, 8, 12_288, 151_936, 40_960),
    "qwen3-32b": _model("qwen3", 64, 5120, 64, 8, 25_600, 151_936, 40_960),
    "qwen3-30b-a3b": _QWEN3_30B,
    "gemma-2-2b": _model("gemma2", 26, 2304, 8, 4, 9216, 256_000, 8192),
    "gemma-2-9b": _model("gemma2", 42, 3584, 16, 8, 14_336, 256_000, 8192),
    "gemma-2-27b": _model("gemma2", 46, 4608, 32, 16, 36_864, 256_000, 8192, head_dim=128),
    "gemma-3-270m": _model("gemma3_text", 18, 640, 4, 1, 2048, 262_144, 32_768, sliding_window=512),
    "gemma-3-1b": _model("gemma3_text", 26, 1152, 4, 1, 6912, 262_144, 32_768, sliding_window=512),
    "gemma-3-4b": _model("gemma3_text", 34, 2560, 8, 4, 10_240, 262_208, 131_072, sliding_window=1024),
    "gemma-3-12b": _model("gemma3_text", 48, 3840, 16, 8, 15_360, 262_208, 131_072, sliding_window=1024),
    "gemma-3-27b": _model("gemma3_text", 62, 5376, 32, 16, 21_504, 262_208, 131_072, head_dim=128, sliding_window=1024),
    "phi-3-mini": _model("phi3", 32, 3072, 32, 32, 8192, 32_064, 131_072),
    "phi-3-mini-4k": _model("phi3", 32, 3072, 32, 32, 8192, 32_064, 4096, sliding_window=2047),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v3": _DEEPSEEK_V3,
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
MODELS = tuple(CONFIGS)
"""The names."""


def find(model: str) -> ModelShape | None:
    """The shape of `model`: a name of the table, with or without what hubs add to it; None for another."""
    name = _plain(model)
    base, _, variant = name.rpartition("-")
    if name in CONFIGS:
        return shape_of(CONFIGS[name], name)
    if base not in CONFIGS or variant not in ("mha", "mqa"):
        return None
    shape = shape_of(CONFIGS[base], name)
    return shape.with_kv_heads(shape.q_heads if variant == "mha" else 1)


def table_config(model: str) -> Mapping[str, Any]:
    """The abbreviated config.json of a name of the table, with the architecture that its family has on hubs. KeyError
    for another name."""
    name = _plain(model)
    config = CONFIGS[name if name in CONFIGS else name.rpartition("-")[0]]
    return {"architectures": [_ARCHITECTURES[config["model_type"]]], **config}


def unknown(model: str) -> ModelError:
    """What to tell somebody who asked for `model`."""
    near = difflib.get_close_matches(_plain(model), MODELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ModelError(
        f"{model} is no model of the table, no local folder or config.json, and no hub id like org/name; {hint}"
        f"The table has {', '.join(MODELS)}; each also with -mha or -mqa behind it"
    )


def _plain(model: str) -> str:
    """A name without organisation and what says which tuning it is."""
    name = model.lower().rpartition("/")[2]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name
