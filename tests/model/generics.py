"""Tiny random decoders that are not native: transformers' own modules compute them."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES: dict[str, dict[str, Any]] = {
    "stablelm": _GROUPED | {"partial_rotary_factor": 0.25},
    "olmo2": _GROUPED,
    "granite": _GROUPED
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "cohere": _GROUPED | {"logit_scale": 0.3},
    "starcoder2": _GROUPED | {"sliding_window": 9},
    "cohere2": _GROUPED | {"logit_scale": 0.3, "sliding_window": 9, "layer_types": _MIXED},
    "vaultgemma": _GROUPED
    | {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": _GROUPED
    | {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": _MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "opt": {key: value for key, value in _SHAPE.items() if key != "intermediate_size"}
    | {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "gptj": _GPT,
    "codegen": _GPT | {"n_ctx": 128},
    "phi": _GROUPED,
    "olmoe": _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
}
GENERICS: dict[str, Any] = {name: AutoConfig.for_model(name, **sizes) for name, sizes in _SIZES.items()}
