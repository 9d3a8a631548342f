"""From the config.json of a native model to its ModelSpec. Stands above the spec and above the families that make it.

An architecture that no family here knows is refused by name. Reads JSON alone: no torch, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.models.configs.families import FAMILIES
from workers.models.configs.fields import Fields
from workers.models.document import load_object
from workers.models.rope import Unsupported
from workers.models.spec import ModelSpec

_ALIBI = ("BloomForCausalLM", "MptForCausalLM", "MPTForCausalLM", "BaichuanForCausalLM", "BaiChuanForCausalLM")


def read_native(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face model folder; raises Unsupported with the name of what stands in the way."""
    config = load_object(folder / "config.json")
    if config is None:
        raise Unsupported(f"{folder} has no config.json: not a model folder")
    return parse_native(config, load_object(folder / "generation_config.json"))


def parse_native(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a parsed config.json (and generation_config.json); raises Unsupported."""
    names = config.get("architectures") or ["(none)"]
    for name in names:
        if name in FAMILIES:
            fields = Fields(config, generation or {})
            return replace(FAMILIES[name](fields, name), fp8_block=fields.fp8_block())
        if name in _ALIBI:
            raise Unsupported(f"architecture {name} is not supported: its positions are ALiBi biases of the scores")
    raise Unsupported(f"architecture {', '.join(names)} is not supported; known: {', '.join(FAMILIES)}")
