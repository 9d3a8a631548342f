"""Falcon (arXiv 2311.16867) in its three layouts: one KV head (7B), KV heads in groups (40B, 180B, Falcon 2), as many
as query heads (the first ones). Defaults are transformers'.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.configs.fields import Fields, every
from workers.models.parts import NormKind, Residual, TensorNames
from workers.models.rope import Rope, Unsupported
from workers.models.spec import ModelSpec

_NAMES = TensorNames(
    root="transformer.",
    embedding="word_embeddings",
    final_norm="ln_f",
    layer="h",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    grouped=True,
)


def falcon(fields: Fields, architecture: str) -> ModelSpec:
    """Attention and MLP side by side, through one norm or two, or one after the other."""
    if fields.flag("alibi"):
        raise Unsupported(f"{architecture} with config field alibi = true is not supported: rotary positions only")
    fields.refuse()
    positions = fields.integer("max_position_embeddings", 2048)
    rope = Rope.parse(fields.config, positions)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, head_dim = fields.integer("num_hidden_layers"), hidden // heads
    residual = _residual(fields)
    names = replace(_NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp") if residual is Residual.PARALLEL else _NAMES
    bias = fields.flag("bias")
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden),
        layers=layers,
        q_heads=heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        context_length=rope.reach(positions),
        scale=head_dim**-0.5,
        windows=every(None, layers, positions),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.stated(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        rope=rope,
        activation=fields.activation("activation", "gelu"),
        gated=False,
        norm=NormKind.LAYER,
        residual=residual,
        names=names,
    )


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.integer("num_kv_heads", heads)
    return 1 if fields.flag("multi_query", True) else heads


def _residual(fields: Fields) -> Residual:
    new, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn", True)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if (new and not parallel) or (norms == 2 and not new) or norms > 2:
        raise Unsupported(
            f"Falcon with new_decoder_architecture = {new}, parallel_attn = {parallel} and num_ln_in_parallel_attn = "
            f"{norms} is not supported"
        )
    if not parallel:
        return Residual.SEQUENTIAL
    return Residual.PARALLEL if norms == 2 else Residual.SHARED
