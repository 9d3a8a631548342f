"""From a config.json of whatever decoder to a ModelShape, as far as sizes go.

More tolerant than `workers.models.spec`, which must know all of the maths: fields have the names of many families, and
a model that wraps a decoder (`text_config`) is read as that decoder. What would make the KV cache another one than the
planner knows is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.plan.shapes import Attention, FeedForward, Latent, Layer, ModelShape
from deploy.staging import ModelError
from workers.models.document import load_object
from workers.models.rope import Unsupported

Config = Mapping[str, Any]

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_COLUMNS = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_UNKNOWN = {
    "is_encoder_decoder": "an encoder beside the decoder",
    "num_kv_shared_layers": "layers that share one cache",
    "index_head_dim": "an index beside the cache",
    "global_head_dim": "head sizes that differ by layer",
    "attention_chunk_size": "attention in chunks",
    "block_configs": "layers that differ by a list of their own",
    "attn_config": "attention described by a section of its own",
}
"""Fields that stand for another kind of cache → what it is."""
_KINDS = {"full_attention": False, "global": False, "sliding_attention": True, "sliding": True, "local": True}
"""Kinds of layers → whether they have a window."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` means where config.json is silent. `norms` per layer, each of `norm` vectors (2: with a
    bias); of every `period` layers the last sees all tokens; `learned` positions are weights; `biased`: every linear
    has a bias, without `out_bias` never attention's last one, with `routing_bias` each expert has one in the router;
    `multi_query`: one KV head unless it is said otherwise; `window_off`: a window counts only where it is switched on.
    """

    matrices: int = 3
    norms: int = 2
    norm: int = 1
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    biased: bool = False
    learned: bool = False
    multi_query: bool = False
    routing_bias: bool = False
    out_bias: bool = True
    period: int = 0
    window_off: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
_FAMILIES = {
    "mistral": _Family(defaults={"sliding_window": 4096}),
    "qwen2": _Family(qkv_bias=True, window_off=True),
    "qwen2_moe": _Family(qkv_bias=True, window_off=True),
    "qwen3": _Family(qk_norm=True, window_off=True, defaults={"head_dim": 128}),
    "qwen3_moe": _Family(qk_norm=True, window_off=True),
    "gemma": _Family(tied=True, defaults={"head_dim": 256}),
    "gemma2": _Family(norms=4, tied=True, period=2, defaults={"head_dim": 256, "sliding_window": 4096}),
    "gemma3": _Family(norms=4, tied=True, qk_norm=True, period=6, defaults=_GEMMA3),
    "gemma3_text": _Family(norms=4, tied=True, qk_norm=True, period=6, defaults=_GEMMA3),
    "cohere2": _Family(norms=1, tied=True, period=4, defaults={"sliding_window": 4096}),
    "gpt2": _Family(matrices=2, norm=2, tied=True, biased=True, learned=True),
    "gpt_bigcode": _Family(matrices=2, norm=2, tied=True, biased=True, learned=True, multi_query=True),
    "gpt_neox": _Family(matrices=2, norm=2, biased=True),
    "falcon": _Family(matrices=2, norms=1, norm=2, tied=True, multi_query=True),
    "starcoder2": _Family(matrices=2, norm=2, tied=True, biased=True, defaults={"sliding_window": None}),
    "phi": _Family(matrices=2, norms=1, norm=2, biased=True),
    "gpt_oss": _Family(biased=True, routing_bias=True, period=2),
    "stablelm": _Family(norm=2),
    "exaone4": _Family(qk_norm=True, period=4),
    "glm4": _Family(norms=4, out_bias=False),
    "glm4_moe": _Family(routing_bias=True, out_bias=False),
    "deepseek_v3": _Family(routing_bias=True),
}


def read_shape(path: Path, name: str) -> ModelShape:
    """The shape in the config.json at `path`, called `name`. Raises ModelError."""
    try:
        config = load_object(path)
    except Unsupported as error:
        raise ModelError(str(error)) from error
    if config is None:
        raise ModelError(f"{path} cannot be read: there is no such file")
    return shape_of(config, name)


def shape_of(config: Config, name: str) -> ModelShape:
    """The shape that a parsed config.json describes, called `name`. Raises ModelError with the field in the way."""
    if isinstance(config.get("text_config"), Mapping):
        config = {key: config[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in config} | {
            key: value for key, value in config["text_config"].items() if value is not None
        }
    family = _FAMILIES.get(str(config.get("model_type")), _Family())
    reader = _Reader({**family.defaults, **config}, family, name)
    try:
        return reader.shape()
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{name}: {error}") from error


class _Reader:
    """One config with its family's defaults filled in."""

    def __init__(self, config: Config, family: _Family, name: str) -> None:
        self._config, self._family, self._name = config, family, name
        for key, what in _UNKNOWN.items():
            if config.get(key):
                raise ModelError(f"{name}: {what} (config field {key}) cannot be planned yet")
        self._hidden, self._heads = self._number(*_HIDDEN), self._number(*_HEADS)
        self._count = self._number(*_LAYERS)
        self._context = self._optional(*_CONTEXT)

    def shape(self) -> ModelShape:
        family, norm = self._family, self._family.norm * self._hidden
        norms = norm * (1 if self._config.get("parallel_attn") else family.norms)
        windows = self._windows()
        attention = {window: self._attention(window) for window in set(windows)}
        layers = [Layer(attention[window], self._mlp(index), norms) for index, window in enumerate(windows)]
        positions = (self._context or 0) * self._hidden if family.learned else 0
        named = str(self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return ModelShape(
            name=self._name,
            layers=tuple(layers),
            hidden=self._hidden,
            vocab=self._number("vocab_size"),
            tied=bool(self._config.get("tie_word_embeddings", family.tied)),
            extra=norm + positions,
            context=self._context,
            dtype=_PRECISIONS.get(named, "bf16"),
        )

    def _attention(self, window: int | None) -> Attention:
        family = self._family
        biased = family.biased or bool(self._config.get("attention_bias") or self._config.get("bias"))
        rank = self._optional("kv_lora_rank")
        if rank:
            rope, nope = self._number("qk_rope_head_dim"), self._number("qk_nope_head_dim")
            latent = Latent(rank, rope, self._optional("q_lora_rank"))
            heads, values = self._heads, self._number("v_head_dim")
            return Attention(heads, heads, nope + rope, values, window, latent)
        biases = (family.qkv_bias or biased, family.out_bias and biased)
        dim = self._optional("head_dim") or self._hidden // self._heads
        return Attention(self._heads, self._kv_heads(), dim, None, window, None, *biases, family.qk_norm)

    def _kv_heads(self) -> int:
        """Falcon's newer form counts KV heads; older ones, like GPT-BigCode, have one for all queries."""
        if self._config.get("multi_query", self._family.multi_query) and not self._config.get(
            "new_decoder_architecture"
        ):
            return 1
        return self._optional(*_KV_HEADS) or self._heads

    def _mlp(self, index: int) -> FeedForward:
        config, matrices = self._config, self._family.matrices
        columns = self._optional(*_COLUMNS) or 4 * self._hidden
        bias = self._family.biased or bool(config.get("mlp_bias") or config.get("bias"))
        experts = self._optional(*_EXPERTS) or 0
        if not experts or not self._is_sparse(index):
            return FeedForward(columns, matrices, bias)
        inner = self._optional("moe_intermediate_size") or columns
        shared = self._optional("shared_expert_intermediate_size")
        routing = self._hidden if shared else 0  # Qwen2's shared expert has a gate of its own
        if config.get("topk_method") == "noaux_tc" or self._family.routing_bias:
            routing += experts
        shared = shared or inner * (self._optional("n_shared_experts") or 0)
        chosen = self._optional("num_experts_per_tok", "moe_topk") or 1
        return FeedForward(inner, matrices, bias, experts, chosen, shared, routing)

    def _is_sparse(self, index: int) -> bool:
        config = self._config
        step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
        if isinstance(step, list):
            return bool(step[index])
        first = int(config.get("first_k_dense_replace") or 0)
        turn = index if config.get("moe_layer_freq") else index + 1
        return index >= first and turn % int(step) == 0 and index not in (config.get("mlp_only_layers") or ())

    def _windows(self) -> list[int | None]:
        """The window of each layer, None where it sees all."""
        config, window, count = self._config, self._optional("sliding_window"), self._count
        kinds = config.get("layer_types") or config.get("layers_block_type")
        if kinds is not None and (unknown := set(kinds) - _KINDS.keys()):
            raise ModelError(
                f"{self._name}: layers of kind {', '.join(sorted(map(str, unknown)))} cannot be planned yet"
            )
        if window is None or not config.get("use_sliding_window", not self._family.window_off):
            return [None] * count
        if kinds is not None:
            if len(kinds) != count:
                raise ModelError(f"{self._name}: layer_types names {len(kinds)} layers of {count}")
            return [window if _KINDS[kind] else None for kind in kinds]
        period = self._optional("sliding_window_pattern") or self._family.period
        if period:
            return [None if (index + 1) % period == 0 else window for index in range(count)]
        full = int(config.get("max_window_layers", 28)) if self._family.window_off else 0
        return [None if index < full else window for index in range(count)]

    def _number(self, *names: str) -> int:
        value = self._optional(*names)
        if value is None:
            raise ModelError(f"{self._name}: config.json lacks {' or '.join(names)}")
        return value

    def _optional(self, *names: str) -> int | None:
        """The first of the fields that is set, a whole number of at least 1."""
        for name in names:
            value = self._config.get(name)
            if value is not None and value != 0:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ModelError(f"{self._name}: config field {name} must be a whole number, got {value!r}")
                return value
        return None
