"""ModelSpec: the shape of a model, read from the config.json of its folder. No torch, no weights.

What it does not know is refused by name, never served wrong: an architecture, a config field that would change the
maths, a weight format. Fields that say nothing about the maths are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.layout import HeadShard, KVLayout, LayerKV, shard_heads
from kvstore.precisions import PrecisionMap
from workers.models.rope import Rope, Unsupported

__all__ = ["ModelSpec", "Rope", "Unsupported"]


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers assumes for an architecture where config.json is silent."""

    max_positions: int
    window: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    bias_field: bool = False
    mlp_bias_field: bool = False
    qk_norm: bool = False
    switch: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(2048, bias_field=True, mlp_bias_field=True),
    "MistralForCausalLM": _Family(131_072, window=4096),
    "Qwen2ForCausalLM": _Family(32_768, window=4096, qkv_bias=True, switch=True),
    "Qwen3ForCausalLM": _Family(32_768, window=4096, head_dim=128, bias_field=True, qk_norm=True, switch=True),
}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "attn_logit_softcap": (None, 0),
    "final_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "query_pre_attn_scalar": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
"""Fields that would change the maths → the values that do not."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements, `norm_eps` of every RMSNorm. `qkv_bias`, `output_bias`, `mlp_bias`: which linears have one.

    `eos_ids` are those of config.json and generation_config.json together; `dtype` is the checkpoint's own, as torch
    names it without the prefix ("bfloat16").
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str

    @classmethod
    def read(cls, folder: Path) -> ModelSpec:
        """The spec of a Hugging Face model folder; raises Unsupported with the name of what stands in the way."""
        config = _load(folder / "config.json")
        if config is None:
            raise Unsupported(f"{folder} has no config.json: not a model folder")
        return cls.parse(config, _load(folder / "generation_config.json") or {})

    @classmethod
    def parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
        """The spec of a parsed config.json (and generation_config.json); raises Unsupported."""
        architecture, family = _family(config)
        max_positions = _integer(config, "max_position_embeddings", family.max_positions)
        layers = _integer(config, "num_hidden_layers")
        rope = Rope.parse(config, max_positions)
        _refuse(config, family, rope.reach(max_positions), layers)
        hidden, q_heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        kv_heads = _integer(config, "num_key_value_heads", q_heads)
        head_dim = _integer(config, "head_dim", family.head_dim or hidden // q_heads)
        if q_heads % kv_heads:
            raise Unsupported(f"num_attention_heads {q_heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2 or head_dim < 4:
            raise Unsupported(f"head_dim {head_dim} is not supported: it must be even and at least 4")
        attention_bias = family.bias_field and bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            layers=layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.mlp_bias_field and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            rope=rope,
            eos_ids=_ids(config, generation or {}, "eos_token_id"),
            bos_id=config.get("bos_token_id"),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )

    @property
    def context_length(self) -> int:
        """Tokens that the model's positions reach: its own length, stretched by a linear, dynamic or yarn rope."""
        return self.rope.reach(self.max_position_embeddings)

    def shards(self, ranks: int) -> tuple[HeadShard, ...]:
        """The attention heads of each rank; ValueError when there are more ranks than query heads."""
        return shard_heads(self.q_heads, self.kv_heads, ranks)

    def layout(self, block_size: int, precision: PrecisionMap, ranks: int) -> tuple[KVLayout, ...]:
        """The pages of each rank, `block_size` tokens per block. PrecisionError for a map that names layers that are
        not there; what is "auto" in it must have been settled."""
        stored = precision.of(self.layers)
        return tuple(
            KVLayout(
                block_size, tuple(LayerKV.pair(shard.kv_heads, self.head_dim, one.key, one.value) for one in stored)
            )
            for shard in self.shards(ranks)
        )


def _load(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unsupported(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Unsupported(f"{path} is not a JSON object")
    return content


def _family(config: Mapping[str, Any]) -> tuple[str, _Family]:
    names = config.get("architectures") or ["(none)"]
    known = [name for name in names if name in _FAMILIES]
    if not known:
        raise Unsupported(f"architecture {', '.join(names)} is not supported; known: {', '.join(_FAMILIES)}")
    return known[0], _FAMILIES[known[0]]


def _integer(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Unsupported(f"config field {field} must be an integer of at least 1, got {value!r}")
    return value


def _ids(config: Mapping[str, Any], generation: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """Token ids of `field` in both files, each once, in order."""
    found: dict[int, None] = {}
    for source in (config, generation):
        value = source.get(field)
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                found[int(item)] = None
    return tuple(found)


def _refuse(config: Mapping[str, Any], family: _Family, reach: int, layers: int) -> None:
    """Raise Unsupported for every field whose value would change the maths."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
        raise Unsupported(f"weight format {method!r} (config field quantization_config) is not supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Unsupported(f"hidden_act {activation!r} is not supported; known: silu")
    for field, neutral in _NEUTRAL.items():
        if config.get(field) not in neutral:
            raise Unsupported(f"config field {field} = {config[field]!r} is not supported")
    window = _active_window(config, family, layers)
    if window is not None and window < reach:
        raise Unsupported(
            f"sliding_window {window} is not supported (the model reaches {reach} positions); "
            "a window switched off in config.json (null, or use_sliding_window false) is accepted"
        )


def _active_window(config: Mapping[str, Any], family: _Family, layers: int) -> int | None:
    """The sliding window in tokens if some layer uses one."""
    window: int | None = config.get("sliding_window", family.window)
    if window is None or not config.get("use_sliding_window", not family.switch):
        return None
    if not family.switch:
        return window
    types = config.get("layer_types")
    if types is None:
        return window if int(config.get("max_window_layers", 28)) < layers else None
    return window if any(kind != "full_attention" for kind in types) else None
