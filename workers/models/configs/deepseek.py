"""Models with MLA: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 and R1 (arXiv 2412.19437), MiniCPM3 (arXiv 2404.06395).
Defaults are transformers'.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.configs.fields import Fields
from workers.models.rope import Rope, Unsupported
from workers.models.shapes import ExpertShape, LatentShape, Routing, Scoring
from workers.models.spec import ModelSpec

_METHODS = {
    "greedy": Routing(1, normalised=False),
    "group_limited_greedy": Routing(1, normalised=False),
    "noaux_tc": Routing(1, Scoring.SIGMOID, deciding=2, corrected=True),
}
"""config.json's topk_method → what it says of routing."""


def deepseek_v2(fields: Fields, architecture: str) -> ModelSpec:
    """Experts by softmax, from a token's best groups or from all; pairs of a rotation are neighbours."""
    fields.expect("mlp_bias", None, False)
    fields.expect("norm_topk_prob", None, False)
    fields.expect("scoring_func", None, "softmax")
    spec = _spec(fields, architecture, positions=2048, values=128, interleaved=True, tied=False)
    method = fields.config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"topk_method {method!r} is not supported in {architecture}")
    return replace(spec, experts=_experts(fields, spec.layers, method, first_dense=0, scale=1.0))


def deepseek_v3(fields: Fields, architecture: str) -> ModelSpec:
    """Experts by sigmoid, corrected for the choice by a bias each. Layers that predict further tokens are not used."""
    fields.expect("topk_method", None, "noaux_tc")
    fields.expect("scoring_func", None, "sigmoid")
    spec = _spec(
        fields,
        architecture,
        positions=4096,
        values=128,
        interleaved=fields.flag("rope_interleave", True),
        tied=False,
    )
    experts = _experts(fields, spec.layers, "noaux_tc", first_dense=3, scale=2.5)
    further = fields.config.get("num_nextn_predict_layers", fields.config.get("num_mtp_layers", 1))
    return replace(spec, experts=experts, unused_layers=int(further or 0))


def minicpm3(fields: Fields, architecture: str) -> ModelSpec:
    """No experts; embeddings, what layers give and what logits are made of are scaled. Pairs of a rotation lie half a
    head apart. With LongRoPE it is served up to the original length."""
    fields.expect("mlp_bias", None, False)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    spec = _spec(fields, architecture, positions=32_768, values=hidden // heads, interleaved=False, tied=True, eps=1e-5)
    branch = 1.0
    if fields.config.get("scale_depth", 1.4) is not None:
        branch = fields.number("scale_depth", 1.4) / spec.layers**0.5
    base = fields.number("dim_model_base", 256 if "dim_model_base" not in fields.config else hidden)
    return replace(
        spec,
        embedding_scale=fields.number("scale_emb", 12),
        branch_scale=branch,
        final_scale=base / hidden,
    )


def _spec(
    fields: Fields,
    architecture: str,
    *,
    positions: int,
    values: int,
    interleaved: bool,
    tied: bool,
    eps: float = 1e-6,
) -> ModelSpec:
    fields.refuse()
    sizes = fields.sizes()
    fields.expect("num_key_value_heads", None, sizes["q_heads"])
    positions = fields.integer("max_position_embeddings", positions)
    rope = Rope.parse(fields.config, positions)
    bias = fields.flag("attention_bias")
    latent = LatentShape(
        rank=fields.integer("kv_lora_rank"),
        rope=fields.integer("qk_rope_head_dim"),
        nope=fields.integer("qk_nope_head_dim"),
        values=fields.integer("v_head_dim", values),
        q_rank=None if fields.config.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        interleaved=interleaved,
        biased=bias,
    )
    return ModelSpec(
        architecture=architecture,
        **sizes,
        kv_heads=1,
        head_dim=latent.query,
        context_length=rope.reach(positions),
        scale=latent.query**-0.5 * rope.score_factor,
        windows=(None,) * sizes["layers"],
        norm_eps=fields.number("rms_norm_eps", eps),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        **fields.stated(),
        output_bias=bias,
        rope=rope,
        activation=fields.activation("hidden_act", "silu", ("silu", "swish")),
        latent=latent,
    )


def _experts(fields: Fields, layers: int, method: str, *, first_dense: int, scale: float) -> ExpertShape | None:
    """None for a model without any."""
    if not fields.config.get("n_routed_experts"):
        return None
    known = _METHODS[method]
    experts, columns = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    grouped = method != "greedy"
    routing = replace(
        known,
        chosen=fields.integer("num_experts_per_tok"),
        normalised=fields.flag("norm_topk_prob", known.normalised),
        scale=fields.number("routed_scaling_factor", scale),
        groups=fields.integer("n_group", 1) if grouped else 1,
        open_groups=fields.integer("topk_group", 1) if grouped else 1,
    )
    dense, step = fields.config.get("first_k_dense_replace", first_dense) or 0, fields.integer("moe_layer_freq", 1)
    return ExpertShape(
        experts=experts,
        columns=columns,
        shared=columns * int(fields.config.get("n_shared_experts") or 0),
        sparse=tuple(layer >= dense and layer % step == 0 for layer in range(layers)),
        routing=routing,
    )
