"""Fields: a config.json, and the generation_config.json beside it, read field by field. It knows no family.

A value of the wrong kind, or one that would change the maths in a way that nobody here computes, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from workers.models.rope import Unsupported

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""transformers' names → those of workers.kernels.Activation."""

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
    "alibi": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
}
"""Fields that would change the maths → the values that do not."""


class Sizes(TypedDict):
    """In elements, as ModelSpec takes them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int


class Stated(TypedDict):
    """What every family spells alike, as ModelSpec takes it: ids of both files together, and the checkpoint's own dtype
    as torch names it without the prefix."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str


class Fields:
    """`config` and `generation` as parsed; every method raises Unsupported for a value that cannot be."""

    def __init__(self, config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        self.config = config
        self._generation = generation

    def integer(self, field: str, default: int | None = None) -> int:
        """At least 1; `default` where the field is absent or null."""
        value = self.config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Unsupported(f"config field {field} must be an integer of at least 1, got {value!r}")
        return value

    def number(self, field: str, default: float) -> float:
        """Above 0; `default` where the field is absent or null."""
        value = self.config.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise Unsupported(f"config field {field} must be a number above 0, got {value!r}")
        return float(value)

    def sizes(self) -> Sizes:
        """Of a family that uses the usual names and has no defaults for them."""
        return Sizes(
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            intermediate_size=self.integer("intermediate_size"),
            layers=self.integer("num_hidden_layers"),
            q_heads=self.integer("num_attention_heads"),
        )

    def stated(self) -> Stated:
        """Where nothing is said: no ids, and float32."""
        named = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        return Stated(
            eos_ids=self._eos_ids(),
            bos_id=self.config.get("bos_token_id"),
            dtype=str(named).removeprefix("torch."),
        )

    def cap(self, field: str, default: float | None) -> float | None:
        """A soft-cap: None for null and 0, `default` only where the field is absent."""
        value = self.config.get(field, default)
        return self.number(field, value) if value else None

    def flag(self, field: str, default: bool = False) -> bool:
        """`default` where the field is absent or null."""
        value = self.config.get(field)
        return default if value is None else bool(value)

    def activation(self, field: str, default: str, known: Sequence[str] = tuple(_ACTIVATIONS)) -> str:
        """As workers.kernels.Activation names it."""
        value = self.config.get(field) or default
        if value not in known:
            raise Unsupported(f"{field} {value!r} is not supported; known: {', '.join(known)}")
        return _ACTIVATIONS[value]

    def refuse(self, *but: str) -> None:
        """Raise Unsupported for every field whose value would change the maths, `but` those that the family knows."""
        self.fp8_block()
        for field, neutral in _NEUTRAL.items():
            if field not in but:
                self.expect(field, *neutral)

    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns of FP8 weights that share a scale, None where weights are plain numbers. Raises Unsupported
        for any other weight format."""
        given = self.config.get("quantization_config")
        if not given:
            return None
        method = given.get("quant_method", "?") if isinstance(given, Mapping) else "?"
        advice = "use the model in bf16 or fp16, in FP8 with scales per block as DeepSeek-V3 has it, or as GGUF"
        if method != "fp8":
            raise Unsupported(f"weight format {method!r} (config field quantization_config) is not supported; {advice}")
        block, kind = given.get("weight_block_size"), given.get("fmt", "e4m3")
        if kind != "e4m3" or not isinstance(block, list) or [type(size) for size in block] != [int, int]:
            raise Unsupported(
                f"weight format 'fp8' with fmt {kind!r} and weight_block_size {block!r} (config field "
                f"quantization_config) is not supported; {advice}"
            )
        if min(block) < 1:
            raise Unsupported(f"weight_block_size (config field quantization_config) must be at least 1, got {block}")
        return block[0], block[1]

    def expect(self, field: str, *neutral: object) -> None:
        """Raise Unsupported unless the field has one of the `neutral` values or is absent."""
        if field in self.config and self.config[field] not in neutral:
            raise Unsupported(f"config field {field} = {self.config[field]!r} is not supported")

    def _eos_ids(self) -> tuple[int, ...]:
        """Those of both files, each once, in order."""
        found: dict[int, None] = {}
        for source in (self.config, self._generation):
            value = source.get("eos_token_id")
            for item in value if isinstance(value, list) else [value]:
                if item is not None:
                    found[int(item)] = None
        return tuple(found)


def every(window: int | None, layers: int, reach: int) -> tuple[int | None, ...]:
    """The same `window` in all layers; one that is no shorter than all that a model can see is none."""
    return ((window if window is not None and window < reach else None),) * layers


def alternating(types: object, window: int | None, layers: int, reach: int) -> tuple[int | None, ...]:
    """Windows by config.json's layer_types, "full_attention" or "sliding_attention" for each layer."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise Unsupported(f"config field layer_types must name the kind of each of {layers} layers, got {types!r}")
    if strange := [kind for kind in types if kind not in known]:
        raise Unsupported(f"layer_types {strange[0]!r} is not supported; known: {', '.join(known)}")
    sliding = every(window, layers, reach)
    return tuple(one if kind == known[1] else None for kind, one in zip(types, sliding, strict=True))
