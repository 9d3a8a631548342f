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
    sizes, reach = fields.sizes(), rope.reach(positions)
    head_dim = sizes["hidden_size"] // sizes["q_heads"]
    return ModelSpec(
        architecture=architecture,
        **sizes,
        kv_heads=fields.integer("num_key_value_heads", sizes["q_heads"]),
        head_dim=head_dim,
        context_length=reach,
        scale=head_dim**-0.5,
        windows=every(fields.config.get("sliding_window"), sizes["layers"], reach),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        **fields.stated(),
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
