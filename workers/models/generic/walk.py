"""describe: what a decoder of transformers asks of attention, found out by running it without weights.

The model is built on torch's meta device, where tensors have shapes and no values, and many tokens are sent through
it. Each layer's call of the attention interface tells heads, sizes, scale and soft-cap; the rule of the mask that it is
called with tells its window. Whatever else is asked of attention, and layers that ask nothing, are refused by name.
As a program it prints the spec as JSON: `python -m workers.models.generic.walk FOLDER`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workers.models.document import load_object
from workers.models.generic.interface import WALKED, attending
from workers.models.generic.spec import GenericSpec, LayerAttention
from workers.models.identity import ModelIdentity
from workers.models.rope import Unsupported

_TOKENS = 16_384
"""So many that what changes with the length of a context, such as compressed or sparse attention, would show."""
_FAR = 2**20
"""A position beyond every window that is not as good as none."""
_STATES = ("mamba", "recurrent", "rglru", "rwkv", "xlstm", "mlstm", "deltanet", "shortconv", "lightning")
"""Parts of the class names of layers that keep a state which is no key and value."""
_PLAIN = frozenset(
    (
        "cache_position", "dropout", "is_causal", "labels", "logits_to_keep", "output_attentions",
        "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict",
        "sliding_window", "use_cache",
    )
)  # fmt: skip
"""What layers pass to attention that changes nothing here; the window is read off the mask, which decides."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One layer's call."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    attention: LayerAttention


@dataclass
class _Walk:
    """What the layers of the model `name` say. `masks` are those that were made, with their windows."""

    name: str
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list)
    seen: dict[int, _Seen] = field(default_factory=dict)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """An Attend that notes the call."""
        index = getattr(module, "layer_idx", None)
        kind = type(module).__name__
        if not isinstance(index, int):
            raise Unsupported(f"{self.name}: its {kind} does not say which layer it is")
        if index in self.seen:
            raise Unsupported(f"{self.name}: layer {index} ({kind}) attends more than once")
        if key.shape[2] != query.shape[2]:
            raise Unsupported(f"{self.name}: layer {index} ({kind}) attends over more than the tokens themselves")
        self.seen[index] = _Seen(
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            self._read(index, module, query, mask, options),
        )
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def mask(self, said: Mapping[str, Any]) -> Tensor:
        """A Mask that notes its rule."""
        window = window_of(said["mask_function"])
        if window == 0:
            raise Unsupported(f"{self.name}: its attention mask is neither causal nor a sliding window")
        made = torch.zeros(1, 1, said["q_length"], said["kv_length"], dtype=torch.bool, device="meta")
        self.masks.append((made, window))
        return made

    def _read(
        self, index: int, module: Any, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> LayerAttention:
        given = {name: value for name, value in options.items() if value is not None}
        sinks, softcap = given.pop("s_aux", None), given.pop("softcap", None)
        scale = given.pop("scaling", query.shape[-1] ** -0.5)
        if strange := sorted(given.keys() - _PLAIN):
            raise Unsupported(f"{self.name}: layer {index} asks of attention what nobody here does: {strange[0]}")
        if not isinstance(scale, float | int) or not isinstance(softcap, float | int | None):
            raise Unsupported(f"{self.name}: layer {index} has a scale or soft-cap that is computed as it runs")
        if getattr(module, "is_causal", True) is False or given.get("is_causal") is False:
            raise Unsupported(f"{self.name}: layer {index} sees later tokens too")
        return LayerAttention(float(scale), softcap or None, self._window(index, mask), sinks is not None)

    def _window(self, index: int, mask: Tensor | None) -> int | None:
        known = {id(made): window for made, window in self.masks}
        for tensor in (mask, None if mask is None else mask._base):
            if tensor is not None and id(tensor) in known:
                return known[id(tensor)]
        raise Unsupported(f"{self.name}: layer {index} makes an attention mask of its own")


def window_of(rule: Callable[..., Any]) -> int | None:
    """The sliding window of a mask function (batch, head, query, key) → visible: None for a causal one without, 0 for
    anything else."""
    low, high = 0, _FAR
    try:
        while low < high:  # the first key that the query at _FAR sees
            middle = (low + high) // 2
            low, high = (low, middle) if _visible(rule, [(_FAR, middle)])[0] else (middle + 1, high)
        window = _FAR - low + 1 if low else None
        reach = window or 1
        queries = {0, 1, 2, 7, reach - 1, reach, reach + 1, 2 * reach + 3, 9973, _FAR - 1, _FAR}
        offsets = {-2, -1, 0, 1, 2, reach - 2, reach - 1, reach, reach + 1, 2 * reach, 4097}
        pairs = [(query, query - offset) for query in sorted(queries) for offset in offsets if query >= offset]
        expected = [key <= query and (window is None or key > query - window) for query, key in pairs]
        return window if _visible(rule, pairs) == expected else 0
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return 0  # a rule that needs more than positions


def _visible(rule: Callable[..., Any], pairs: list[tuple[int, int]]) -> list[bool]:
    query, key = torch.tensor(pairs).unbind(1)
    found = rule(torch.zeros_like(query), torch.zeros_like(query), query, key)
    return [bool(each) for each in torch.as_tensor(found).expand(len(pairs)).tolist()]


def describe(folder: Path) -> GenericSpec:
    """The spec of the model in `folder`, without its weights; raises Unsupported with what stands in the way."""
    identity = ModelIdentity.read(folder)
    config = _config(folder, identity.architecture)
    name = identity.architecture
    model = _build(name, config)
    walk = _walk(name, model, min(_TOKENS, identity.context_length))
    seen = _uniform(name, walk, _count(config, walk))
    first = seen[0]
    hidden = int(model.get_input_embeddings().weight.shape[-1])
    return GenericSpec(
        architecture=name,
        vocab_size=identity.vocab_size,
        hidden_size=hidden,
        intermediate_size=_columns(config) or 4 * hidden,
        q_heads=first.q_heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        attention=tuple(_within(each.attention, identity.context_length) for each in seen),
        context_length=identity.context_length,
        eos_ids=identity.eos_ids,
        bos_id=identity.bos_id,
        dtype=identity.dtype,
        ropes=(f"transformers {transformers.__version__}",),
    )


def _config(folder: Path, name: str) -> Any:
    """transformers' own reading of config.json: what it leaves out has the family's defaults."""
    written = load_object(folder / "config.json") or {}
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(written["model_type"]))
    if known is None or name not in ((known,) if isinstance(known, str) else known):
        raise Unsupported(
            f"{name} is neither native nor a decoder of the installed transformers {transformers.__version__} "
            f"(model_type {written['model_type']}); code that comes with a model is never run"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unsupported(f"{name}: transformers cannot read its config.json: {error}") from error


def _build(name: str, config: Any) -> Any:
    """The model on the meta device."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=WALKED, experts_implementation="batched_mm"
            )
    except Exception as error:  # whatever foreign code makes of a config
        raise _foreign(name, error) from error
    kinds = {type(module).__name__ for module in model.modules()}
    if states := sorted(kind for kind in kinds if any(word in kind.lower() for word in _STATES)):
        raise Unsupported(f"{name} cannot be served: {states[0]} keeps a recurrent state, no keys and values")
    return model.eval()


def _walk(name: str, model: Any, length: int) -> _Walk:
    walk = _Walk(name)
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    # A given mask of ones keeps transformers from looking at positions for packed rows, which have no values here.
    ones = torch.ones(1, length, dtype=torch.bool, device="meta")
    try:
        with torch.no_grad(), attending(walk.attend, walk.mask):
            model(input_ids=tokens, attention_mask=ones, position_ids=_positions(name, model, tokens), use_cache=False)
    except Unsupported:
        raise
    except Exception as error:  # whatever foreign code does on the meta device
        raise _foreign(name, error) from error
    return walk


def _foreign(name: str, error: Exception) -> Unsupported:
    """What an error of transformers' own code says about the model."""
    if isinstance(error, KeyError) and WALKED in str(error):
        return Unsupported(f"{name} cannot be served: its layers do not use transformers' attention interface")
    return Unsupported(f"{name}: transformers' modules cannot be built and run without weights: {error!r}")


def _positions(name: str, model: Any, tokens: Tensor) -> Tensor:
    if "position_ids" not in inspect.signature(type(model.get_decoder()).forward).parameters:
        raise Unsupported(
            f"{name} cannot be served: its forward takes no position_ids, so that tokens of several requests cannot "
            "share a step"
        )
    return torch.arange(tokens.shape[1], device="meta")[None]


def _count(config: Any, walk: _Walk) -> int:
    """How many layers the model ought to have."""
    count = getattr(config, "num_hidden_layers", None)
    return int(count) if isinstance(count, int) else len(walk.seen)


def _columns(config: Any) -> int:
    """The widest MLP's, 0 where that is not said."""
    given = getattr(config, "intermediate_size", None) or 0
    return max(map(int, given)) if isinstance(given, list | tuple) else int(given)


def _uniform(name: str, walk: _Walk, count: int) -> tuple[_Seen, ...]:
    """What every layer of `count` asks for; they differ in windows and the like alone."""
    silent = [index for index in range(count) if index not in walk.seen]
    if silent:
        shown = ", ".join(map(str, silent[:4])) + (", …" if len(silent) > 4 else "")
        what = "none of its layers calls" if len(silent) == count else f"layers {shown} do not call"
        raise Unsupported(
            f"{name} cannot be served: {what} transformers' attention interface, which is where the paged KV cache is"
        )
    if len(walk.seen) > count:
        raise Unsupported(f"{name}: {len(walk.seen)} layers attend, config.json says {count}")
    seen = tuple(walk.seen[index] for index in range(count))
    sizes = {(each.q_heads, each.kv_heads, each.head_dim) for each in seen}
    if len(sizes) > 1:
        raise Unsupported(f"{name}: its layers have heads of several numbers or sizes")
    first = seen[0]
    if first.value_dim != first.head_dim:
        raise Unsupported(f"{name}: values of {first.value_dim} elements beside keys of {first.head_dim}")
    if first.q_heads % first.kv_heads:
        raise Unsupported(f"{name}: {first.q_heads} query heads are no multiple of {first.kv_heads} KV heads")
    return seen


def _within(attention: LayerAttention, context: int) -> LayerAttention:
    """Without a window that no sequence reaches the end of."""
    if attention.window is None or attention.window < context:
        return attention
    return LayerAttention(attention.scale, attention.softcap, None, attention.sinks)


def main() -> None:
    """Print the spec of the model in argv[1], or say on stderr what stands in the way."""
    try:
        print(json.dumps(describe(Path(sys.argv[1])).plain))
    except Unsupported as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
