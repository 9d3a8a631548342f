"""Rope: how a model rotates queries and keys by position, read from any of the spellings that config.json files use.

It knows the parameters and which of them are refused; the frequencies themselves are computed in workers/layers.py.
Spellings: `rope_parameters` (transformers 5), `rope_scaling` with `rope_type` or `type` (before), `rope_theta` inside
or beside it. Kinds: default, linear, dynamic (NTK), llama3, yarn (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class Unsupported(ValueError):
    """A model that would be served wrong: the message names the architecture, config field or weight format."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding parameters.

    `factor` stretches the context beyond `original_length` tokens; `low_freq`/`high_freq` belong to llama3,
    `beta_fast`/`beta_slow`/`truncate` to yarn; `attention_factor` multiplies cosine and sine (yarn, else 1).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 2048
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    @classmethod
    def parse(cls, config: Mapping[str, Any], max_positions: int) -> Rope:
        """The rope of a config.json; raises Unsupported for an unknown kind or a field that is missing or partial."""
        field, params = _params(config)
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind not in KINDS:
            raise Unsupported(f"rope type {kind!r} ({field}) is not supported; known: {', '.join(KINDS)}")
        partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise Unsupported(f"partial_rotary_factor {partial} is not supported (only 1)")
        theta = float(params.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        if kind == "default":
            return cls(theta=theta, original_length=max_positions)
        return _scaled(cls, kind, theta, field, params, config, max_positions)

    def reach(self, max_positions: int) -> int:
        """Tokens of context: the model's own `max_positions`, stretched by a linear, dynamic or yarn rope."""
        if self.kind in ("linear", "dynamic", "yarn"):
            return max(max_positions, int(self.original_length * self.factor))
        return max_positions


def _params(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(name of the field, its content); transformers 5 may nest one dictionary per layer type."""
    for field in ("rope_scaling", "rope_parameters"):
        params = config.get(field)
        if not params:
            continue
        if not isinstance(params, Mapping):
            raise Unsupported(f"{field} must be a dictionary, got {params!r}")
        nested = {key: value for key, value in params.items() if isinstance(value, Mapping)}
        if set(nested) - {"full_attention"}:
            raise Unsupported(f"{field} differs between layer types ({', '.join(nested)}); not supported")
        return field, nested.get("full_attention", params)
    return "rope_parameters", {}


def _scaled(
    cls: type[Rope],
    kind: str,
    theta: float,
    field: str,
    params: Mapping[str, Any],
    config: Mapping[str, Any],
    max_positions: int,
) -> Rope:
    original = max_positions
    if kind in ("llama3", "yarn"):
        outer = config.get("original_max_position_embeddings")
        original = int(outer or params.get("original_max_position_embeddings") or max_positions)
    factor = params.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    names = {"factor": factor}
    if kind == "llama3":
        names |= {name: params.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    for name, value in names.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise Unsupported(f"{field}.{name} of rope type {kind!r} must be a number above 0, got {value!r}")
    return cls(
        kind=kind,
        theta=theta,
        factor=float(names["factor"] or 1.0),
        original_length=original,
        low_freq=float(names.get("low_freq_factor") or 1.0),
        high_freq=float(names.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, float(names["factor"] or 1.0), params),
        truncate=bool(params.get("truncate", True)),
    )


def _attention_factor(kind: str, factor: float, params: Mapping[str, Any]) -> float:
    if kind != "yarn":
        return 1.0
    given = params.get("attention_factor")
    if given is not None:
        return float(given)
    scale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if scale and all_dim:
        return _mscale(factor, float(scale)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
