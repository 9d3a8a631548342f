"""Llama and its kin: Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, SmolLM2. Defaults are what transformers assumes where
config.json is silent.
"""

from __future__ import annotations

from dataclasses import replace

from workers.models.configs.fields import Fields, alternating, every
from workers.models.rope import Rope, Unsupported
from workers.models.shapes import ExpertShape, Routing
from workers.models.spec import ModelSpec

_COUNTS = ("num_experts", "num_local_experts")


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


def mixtral(fields: Fields, architecture: str) -> ModelSpec:
    """Mistral with experts in all layers (arXiv 2401.04088)."""
    window = fields.config.get("sliding_window")
    spec = _spec(fields, architecture, positions=131_072, window=window, theta=1e6, known=_COUNTS)
    experts = ExpertShape(
        experts=fields.integer("num_local_experts", fields.integer("num_experts", 8)),
        columns=spec.intermediate_size,
        shared=0,
        sparse=(True,) * spec.layers,
        routing=Routing(fields.integer("num_experts_per_tok", 2)),
        prefixes=("block_sparse_moe.", "mlp."),
        parts=("w1", "w3", "w2"),
    )
    return replace(spec, experts=experts)


def qwen3_moe(fields: Fields, architecture: str) -> ModelSpec:
    """Qwen3 with experts in all layers, or in some (arXiv 2505.09388)."""
    fields.expect("use_sliding_window", None, False)
    bias = fields.flag("attention_bias")
    spec = _spec(fields, architecture, positions=32_768, qkv_bias=bias, output_bias=bias, qk_norm=True, known=_COUNTS)
    dense, step = fields.config.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    experts = ExpertShape(
        experts=fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        columns=fields.integer("moe_intermediate_size", 768),
        shared=0,
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(spec.layers)),
        routing=Routing(fields.integer("num_experts_per_tok", 8), normalised=fields.flag("norm_topk_prob")),
    )
    return replace(spec, experts=experts)


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
    theta: float = 1e4,
    known: tuple[str, ...] = (),
) -> ModelSpec:
    positions = fields.integer("max_position_embeddings", positions)
    rope = Rope.parse({"rope_theta": theta, **fields.config}, positions)
    fields.refuse(*known)
    sizes, reach = fields.sizes(), rope.reach(positions)
    layers, q_heads = sizes["layers"], sizes["q_heads"]
    head_dim = fields.integer("head_dim", head_dim or sizes["hidden_size"] // q_heads)
    return ModelSpec(
        architecture=architecture,
        **sizes,
        kv_heads=fields.integer("num_key_value_heads", q_heads),
        head_dim=head_dim,
        context_length=reach,
        scale=head_dim**-0.5,
        windows=_typed(fields, window, layers, reach) if typed else every(window, layers, reach),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        **fields.stated(),
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
