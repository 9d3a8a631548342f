"""ModelIdentity: what whoever speaks to a model's clients must know of it, from config.json alone and without torch.

Native models are read by reading.py; of any other this takes the few fields that every decoder of transformers has, and
knows nothing of what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.configs.families import FAMILIES
from workers.models.configs.fields import Fields
from workers.models.document import load_object
from workers.models.reading import parse_native
from workers.models.refusals import refusal
from workers.models.spec import Unsupported

_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
_BATCH_ROPES = ("dynamic", "longrope", "su")
"""Rotary embeddings whose frequencies change for everybody when one row is longer than the original context."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """`context_length` in tokens; `eos_ids` are those of config.json and generation_config.json together; `dtype` is
    the checkpoint's own, as torch names it without the prefix."""

    architecture: str
    native: bool
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str

    @classmethod
    def read(cls, folder: Path) -> ModelIdentity:
        """Of the model in `folder`; raises Unsupported."""
        config = load_object(folder / "config.json")
        if config is None:
            raise Unsupported(f"{folder} has no config.json: not a model folder")
        generation = load_object(folder / "generation_config.json") or {}
        if is_native(config):
            spec = parse_native(config, generation)
            return cls(
                spec.architecture, True, spec.vocab_size, spec.context_length, spec.eos_ids, spec.bos_id, spec.dtype
            )
        return cls.parse(config, generation)

    @classmethod
    def parse(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelIdentity:
        """Of a model that is not native; raises Unsupported with the reason when nobody can serve it."""
        name = architecture(config)
        if why := refusal(config):
            raise Unsupported(f"{name} cannot be served: {why}")
        if not isinstance(config.get("model_type"), str):
            raise Unsupported(
                f"architecture {name} is not native, and config.json has no model_type by which transformers knows it; "
                f"native: {', '.join(FAMILIES)}"
            )
        return cls(
            architecture=name,
            native=False,
            vocab_size=_first(name, config, ("vocab_size",)),
            context_length=_context(name, config),
            **Fields(config, generation).stated(),
        )


def architecture(config: Mapping[str, Any]) -> str:
    """The class that config.json names first."""
    names = config.get("architectures") or ["(none)"]
    return str(names[0])


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether one of the architectures that config.json names is computed by this project's own modules."""
    return any(name in FAMILIES for name in config.get("architectures") or ())


def _context(name: str, config: Mapping[str, Any]) -> int:
    """Tokens that the positions reach; as far as the frequencies of each row are its own."""
    reach = _first(name, config, _CONTEXT)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    for params in kinds:
        if (params.get("rope_type") or params.get("type")) in _BATCH_ROPES:
            original = params.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
            reach = min(reach, int(original or reach))
    return reach


def _first(name: str, config: Mapping[str, Any], fields: tuple[str, ...]) -> int:
    for field in fields:
        value = config.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
    raise Unsupported(f"config.json of {name} lacks {' or '.join(fields)}, a whole number of at least 1")
