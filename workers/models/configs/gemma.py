"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786): sandwich norms, windows in most layers,
a query scale of their own, scaled embeddings. Defaults are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.models.configs.fields import Fields, alternating
from workers.models.parts import NormKind, Residual, TensorNames
from workers.models.rope import Rope, Unsupported
from workers.models.spec import ModelSpec

_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")


def gemma2(fields: Fields, architecture: str) -> ModelSpec:
    """Every other layer has a window; scores and logits are soft-capped."""
    positions = fields.integer("max_position_embeddings", 8192)
    rope = Rope.parse(fields.config, positions)
    return _spec(fields, architecture, rope, None, period=2, context=rope.reach(positions), caps=(50.0, 30.0))


def gemma3(fields: Fields, architecture: str) -> ModelSpec:
    """Five layers with a window and a rope of their own to one without; norms of each query and key head."""
    positions = fields.integer("max_position_embeddings", 131_072)
    far, near = (Rope.parse(_rope_config(fields.config, kind), positions) for kind in _BASES)
    period = fields.integer("sliding_window_pattern", 6)
    # The positions of config.json are those that a stretched rope reaches already.
    return _spec(fields, architecture, far, near, period=period, context=positions, caps=(None, None))


def _spec(
    fields: Fields,
    architecture: str,
    rope: Rope,
    local_rope: Rope | None,
    *,
    period: int,
    context: int,
    caps: tuple[float | None, float | None],
) -> ModelSpec:
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    types = fields.config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    bias = fields.flag("attention_bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        q_heads=fields.integer("num_attention_heads", 8),
        kv_heads=fields.integer("num_key_value_heads", 4),
        head_dim=fields.integer("head_dim", 256),
        context_length=context,
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        windows=alternating(types, fields.config.get("sliding_window", 4096), layers, context),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.stated(),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=local_rope is not None,
        rope=rope,
        local_rope=local_rope,
        softcap=fields.cap("attn_logit_softcapping", caps[0]),
        logit_softcap=fields.cap("final_logit_softcapping", caps[1]),
        embedding_scale=hidden**0.5,
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm=NormKind.RMS_OFFSET,
        residual=Residual.SANDWICH,
        names=_NAMES,
    )


_BASES = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""Kind of layer → the older field of its base, and the base where nothing is said."""


def _rope_config(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rope of layers of this kind, as config.json would have it if all layers were of it. `rope_scaling` of older
    files is about full layers alone."""
    field, base = _BASES[kind]
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or any(not isinstance(value, Mapping) for value in nested.values()):
        raise Unsupported(f"rope_parameters must have one dictionary per kind of layer, got {nested!r}")
    params = dict(nested.get(kind) or {})
    if kind == "full_attention":
        params |= config.get("rope_scaling") or {}
    return {"rope_parameters": {"rope_theta": config.get(field, base)} | params}
