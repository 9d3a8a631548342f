"""Card: how this version serves a model, and what its attention and its KV cache are like. Reads config.json alone.

Sizes are the planner's, which it knows of any decoder; whether a model is native, generic or refused is what the ranks
would find. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.catalog import local_config
from deploy.description import described
from deploy.plan.modelconfig import read_shape
from deploy.plan.modeltable import find, table_config, unknown
from deploy.plan.shapes import Attention, ModelShape
from deploy.staging import ModelError
from kvstore.layout import KVLayout, LayerKV, Precision
from kvstore.precisions import PrecisionError, PrecisionMap, Stored
from workers.models.document import load_object
from workers.models.generic.spec import GenericSpec
from workers.models.identity import architecture, is_native
from workers.models.reading import parse_native
from workers.models.spec import ModelSpec, Unsupported

NATIVE, GENERIC, REFUSED = "native", "generic", "refused"
Spec = ModelSpec | GenericSpec
BLOCK_SIZE = 64
"""Tokens of a block, for which scales by channel are counted."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are alike, by their `indices`. `kind` is MHA, MQA, GQA or MLA; `ratio`
    query heads read a KV head; `window` in tokens (None: all); `key` and `value` are the precisions of the KV cache;
    `token_bytes` what one of them keeps of one token."""

    indices: tuple[int, ...]
    kind: str
    heads: int
    kv_heads: int
    ratio: int
    head_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    key: str
    value: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Card:
    """A model: `standing` is "native", "generic" or "refused", `why` in words. `layers` is empty where not even the
    sizes are known; `token_bytes` is over all layers of one rank."""

    model: str
    architecture: str
    standing: str
    why: str
    context: int | None = None
    precision: str = ""
    layers: tuple[Layers, ...] = ()
    token_bytes: int = 0

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def card_of(model: str, precision: PrecisionMap, revision: str | None = None) -> Card:
    """The card of `model`: a name of the planner's table, a folder, a config.json, a GGUF file that is converted, or a
    hub id whose config.json is here. Raises ModelError when it is none of these, PrecisionError for a map that names
    layers that are not there."""
    known = find(model)
    path = None
    if known is None or "/" in model:
        try:
            path = local_config(model, revision)
        except ModelError:
            if known is None:
                raise
    if path is None:
        if known is None:
            raise unknown(model)
        config = table_config(model)
        return _card(model, config, _parsed(config), known, precision)
    config = load_object(path) or {}
    try:
        found: ModelShape | str = read_shape(path, model)
    except ModelError as error:
        found = str(error)
    return _card(model, config, _read(path, config), found, precision)


def _parsed(config: Mapping[str, Any]) -> Spec | str:
    """What the ranks would make of a config of the table, or why they would not."""
    try:
        return parse_native(config)
    except Unsupported as error:
        return f"{error}; whether transformers' modules can do it shows where its config.json is here"


def _read(path: Path, config: Mapping[str, Any]) -> Spec | str:
    try:
        if path.name == "config.json":
            return described(path.parent)
        if is_native(config):
            return parse_native(config)
    except ValueError as error:
        return str(error)
    return f"{path.name} is not named config.json, by which transformers would look for it"


def _card(
    model: str, config: Mapping[str, Any], spec: Spec | str, shape: ModelShape | str, precision: PrecisionMap
) -> Card:
    name = architecture(config)
    standing = REFUSED if isinstance(spec, str) else GENERIC if isinstance(spec, GenericSpec) else NATIVE
    why = spec if isinstance(spec, str) else _reason(spec)
    if isinstance(shape, str):
        return Card(model, name, standing, why if why == shape or standing != REFUSED else f"{why}; {shape}")
    auto = Precision.parse(shape.dtype)
    stored = precision.settle(auto).of(len(shape.layers))
    layers = _layers(shape, stored, _softcaps(spec, config, len(shape.layers)))
    return Card(
        model=model,
        architecture=name,
        standing=standing,
        why=why,
        context=shape.context if isinstance(spec, str) else spec.context_length,
        precision=precision.settle(auto).spelled(len(shape.layers)),
        layers=layers,
        token_bytes=sum(len(part.indices) * part.token_bytes for part in layers),
    )


def _reason(spec: Spec) -> str:
    if isinstance(spec, ModelSpec):
        return "computed by Tidegate's own modules, over any number of tensor-parallel ranks"
    return f"computed by the modules of {spec.ropes[0]}, on one rank; it checks itself against them before it serves"


def _softcaps(spec: Spec | str, config: Mapping[str, Any], count: int) -> Sequence[float | None]:
    if isinstance(spec, GenericSpec):
        return [layer.softcap for layer in spec.attention]
    if isinstance(spec, ModelSpec):
        return [spec.softcap] * count
    return [config.get("attn_logit_softcapping") or None] * count


def _layers(shape: ModelShape, stored: Sequence[Stored], softcaps: Sequence[float | None]) -> tuple[Layers, ...]:
    """The layers of `shape`, those that are alike together."""
    alike: dict[tuple[Attention, Stored, float | None], list[int]] = {}
    for index, layer in enumerate(shape.layers):
        alike.setdefault((layer.attention, stored[index], softcaps[index]), []).append(index)
    return tuple(_part(tuple(indices), *facts) for facts, indices in alike.items())


def _part(indices: tuple[int, ...], attention: Attention, stored: Stored, softcap: float | None) -> Layers:
    kept = layer_kv(attention, stored)
    return Layers(
        indices=indices,
        kind=attention.kind,
        heads=attention.q_heads,
        kv_heads=kept.heads,
        ratio=attention.q_heads // kept.heads,
        head_dim=sum(vector.elements for vector in kept.vectors) if attention.latent else attention.head_dim,
        value_dim=attention.values,
        window=attention.window,
        softcap=softcap,
        key=stored.key.label,
        value=stored.value.label,
        token_bytes=KVLayout(BLOCK_SIZE, (kept,)).token_bytes,
    )


def layer_kv(attention: Attention, stored: Stored) -> LayerKV:
    """What one layer of a lone rank keeps of a token. The rotated part beside a quantised latent stays in 16 bits.
    PrecisionError for latents by channel."""
    if attention.latent:
        if stored.key.by_channel:
            raise PrecisionError("", f"MLA's latents cannot be kept in {stored.key.label}; write int4")
        kept = Precision.BF16 if stored.key.scale_bytes else stored.key
        return LayerKV.latent(attention.latent.rank, attention.latent.rope, stored.key, kept)
    return LayerKV.pair(attention.kv_heads, attention.head_dim, stored.key, stored.value, attention.window)
