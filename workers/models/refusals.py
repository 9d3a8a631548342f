"""Why some models cannot be served at all, as far as config.json says it: no paged KV cache holds what they keep, or
they are no decoders of text. Knows families by transformers' `model_type`; reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATE = "it has layers that keep a recurrent state instead of keys and values, which no paged KV cache holds"
_ALIBI = "it adds ALiBi's biases to its attention scores, which no attention kernel here does"
_ENCODER = "it is an encoder with a decoder; only decoders are served"
_CROSS = "its decoder attends over another model's output (cross attention)"
_TWO_WAY = "its attention sees later tokens too, so that it has no KV cache to keep"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3",
            "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
            "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
        ),
        _STATE,
    ),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "longt5", "marian", "mbart", "mt5", "mvp",
            "pegasus", "plbart", "prophetnet", "switch_transformers", "t5", "t5gemma", "udop", "umt5", "whisper",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("git", "mllama", "musicgen", "musicgen_melody", "trocr"), _CROSS),
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
            "xmod",
        ),
        _TWO_WAY,
    ),
}  # fmt: skip
"""`model_type` → why."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the model of this config.json cannot be served, in words; None where nothing in it says so."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
        return (
            f"weight format {method!r} (config field quantization_config) is not supported here: take the model's "
            "16-bit weights"
        )
    if config.get("is_encoder_decoder"):
        return _ENCODER
    if config.get("alibi"):
        return _ALIBI
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in REASONS:
        return REASONS[kind]
    inner = next((field for field in ("text_config", "llm_config", "vision_config") if config.get(field)), None)
    if inner:
        return f"it wraps a decoder of text with other models (config field {inner}); save the decoder by itself"
    return None
