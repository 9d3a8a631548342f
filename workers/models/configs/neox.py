"""GPT-NeoX (arXiv 2204.06745), Pythia: attention and MLP side by side, a part of each head rotated. Defaults are
transformers'.
"""

from __future__ import annotations

from workers.models.configs.fields import Fields, every
from workers.models.parts import NormKind, Residual, TensorNames
from workers.models.rope import Rope
from workers.models.spec import ModelSpec

_NAMES = TensorNames(
    root="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    heads=("embed_out", "lm_head"),
    ignored=("attention.bias", "attention.masked_bias"),
    grouped=True,
)


def gpt_neox(fields: Fields, architecture: str) -> ModelSpec:
    """Older files call the rotated share rotary_pct and the base rotary_emb_base."""
    fields.refuse()
    config = {
        "rope_theta": fields.number("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": fields.number("rotary_pct", 0.25),
    } | dict(fields.config)
    positions = fields.integer("max_position_embeddings", 2048)
    rope = Rope.parse(config, positions, partial=True)
    sizes = fields.sizes()
    head_dim = sizes["hidden_size"] // sizes["q_heads"]
    bias = fields.flag("attention_bias", True)
    return ModelSpec(
        architecture=architecture,
        **sizes,
        kv_heads=sizes["q_heads"],
        head_dim=head_dim,
        context_length=rope.reach(positions),
        scale=head_dim**-0.5,
        windows=every(None, sizes["layers"], positions),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        **fields.stated(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        rope=rope,
        activation=fields.activation("hidden_act", "gelu"),
        gated=False,
        norm=NormKind.LAYER,
        residual=Residual.PARALLEL if fields.flag("use_parallel_residual", True) else Residual.SEQUENTIAL,
        names=_NAMES,
    )
