"""Phi-3 (arXiv 2404.14219): Llama with fused projections, a window in all layers, LongRoPE. Defaults are
transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.models.configs.fields import Fields, every
from workers.models.parts import TensorNames
from workers.models.rope import Rope
from workers.models.spec import ModelSpec

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def phi3(fields: Fields, architecture: str) -> ModelSpec:
    """With LongRoPE it is served up to the original length."""
    fields.refuse()
    positions = fields.integer("max_position_embeddings", 4096)
    rope = Rope.parse(_config(fields.config), positions, partial=True)
    hidden, q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, head_dim, reach = fields.integer("num_hidden_layers"), hidden // q_heads, rope.reach(positions)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        q_heads=q_heads,
        kv_heads=fields.integer("num_key_value_heads", q_heads),
        head_dim=head_dim,
        context_length=reach,
        scale=head_dim**-0.5,
        windows=every(fields.config.get("sliding_window"), layers, reach),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        eos_ids=fields.eos_ids(),
        bos_id=fields.bos_id(),
        dtype=fields.dtype(),
        rope=rope,
        activation=fields.activation("hidden_act", "silu"),
        names=_NAMES,
    )


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Early files call LongRoPE "yarn"."""
    changed = dict(config) | {"original_max_position_embeddings": config.get("original_max_position_embeddings", 4096)}
    for field in ("rope_scaling", "rope_parameters"):
        params = config.get(field)
        if not isinstance(params, Mapping):
            continue
        if "yarn" in (params.get("rope_type"), params.get("type")):
            changed[field] = dict(params) | {"rope_type": "longrope"}
    return changed
