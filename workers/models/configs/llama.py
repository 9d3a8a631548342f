"""Llama and its kin: Mistral, Qwen2, Qwen3, SmolLM2. Defaults are what transformers assumes where config.json is
silent.
"""

from __future__ import annotations

from workers.models.configs.fields import Fields, alternating, every
from workers.models.rope import Rope, Unsupported
from workers.models.spec import ModelSpec


def llama(fields: Fields, architecture: str) -> ModelSpec:
    """Llama 2 and 3, SmolLM2."""
    bias = fields.flag("attention_bias")
    window = fields.config.get("sliding_window")
    if window is not None:
        raise Unsupported(f"sliding_window {window} is not supported in {architecture}")
    return _spec(
        fields, architecture, positions=2048, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias")
    )


def mistral(fields: Fields, architecture: str) -> ModelSpec:
    """A window in all layers, or none."""
    return _spec(fields, architecture, positions=131_072, window=fields.config.get("sliding_window", 4096))


def qwen2(fields: Fields, architecture: str) -> ModelSpec:
    """Biases on queries, keys and values alone."""
    return _spec(fields, architecture, positions=32_768, window=_switched(fields), typed=True, qkv_bias=True)


def qwen3(fields: Fields, architecture: str) -> ModelSpec:
    """Norms of each query and key head."""
    bias = fields.flag("attention_bias")
    return _spec(
        fields,
        architecture,
        positions=32_768,
        window=_switched(fields),
        typed=True,
        head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _spec(
    fields: Fields,
    architecture: str,
    *,
    positions: int,
    window: int | None = None,
    typed: bool = False,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    positions = fields.integer("max_position_embeddings", positions)
    rope = Rope.parse(fields.config, positions)
    fields.refuse()
    layers, reach = fields.integer("num_hidden_layers"), rope.reach(positions)
    hidden, q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or hidden // q_heads)
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
        windows=_typed(fields, window, layers, reach) if typed else every(window, layers, reach),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        eos_ids=fields.eos_ids(),
        bos_id=fields.bos_id(),
        dtype=fields.dtype(),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        rope=rope,
        activation=fields.activation("hidden_act", "silu", ("silu", "swish")),
    )


def _switched(fields: Fields) -> int | None:
    """Qwen's window, which config.json states whether it is used or not."""
    window: int | None = fields.config.get("sliding_window", 4096)
    return window if fields.flag("use_sliding_window") else None


def _typed(fields: Fields, window: int | None, layers: int, reach: int) -> tuple[int | None, ...]:
    """Qwen's layers below max_window_layers have no window; layer_types, where it is given, says which have one."""
    types = fields.config.get("layer_types")
    if window is None or types is None:
        first = int(fields.config.get("max_window_layers", 28))
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return alternating(types, window, layers, reach)
