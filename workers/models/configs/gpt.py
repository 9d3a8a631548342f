"""GPT-2 and GPT-BigCode (StarCoder, arXiv 2305.06161): LayerNorm, learned positions, a plain MLP, biases everywhere.
Defaults are transformers'.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.configs.fields import Fields, every
from workers.models.parts import NormKind, TensorNames
from workers.models.spec import ModelSpec

_NAMES = TensorNames(
    root="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    ignored=("attn.bias", "attn.masked_bias"),
)


def gpt2(fields: Fields, architecture: str) -> ModelSpec:
    """As many KV heads as query heads; linears are stored [in, out]."""
    fields.expect("scale_attn_by_inverse_layer_idx", None, False)
    names = replace(_NAMES, transposed=True)
    return _spec(fields, architecture, kv_heads=_heads(fields), activation="gelu_new", names=names)


def gpt_bigcode(fields: Fields, architecture: str) -> ModelSpec:
    """One KV head, or, without multi_query, as many as query heads."""
    single = fields.flag("multi_query", True)
    kv_heads = 1 if single else _heads(fields)
    names = replace(_NAMES, grouped=not single)
    return _spec(fields, architecture, kv_heads=kv_heads, activation="gelu_pytorch_tanh", names=names)


def _heads(fields: Fields) -> int:
    return fields.integer("n_head", 12)


def _spec(fields: Fields, architecture: str, *, kv_heads: int, activation: str, names: TensorNames) -> ModelSpec:
    fields.refuse()
    hidden, q_heads, layers = fields.integer("n_embd", 768), _heads(fields), fields.integer("n_layer", 12)
    positions, head_dim = fields.integer("n_positions", 1024), hidden // q_heads
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 50_257),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=positions,
        scale=head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0,
        windows=every(None, layers, positions),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.stated(),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=positions,
        activation=fields.activation("activation_function", activation),
        gated=False,
        norm=NormKind.LAYER,
        names=names,
    )
