"""Rope: how a model rotates queries and keys by position, read from any of the spellings that config.json files use.

It knows the parameters and which of them are refused; the frequencies themselves are computed in workers/layers.py.
Spellings: `rope_parameters` (transformers 5), `rope_scaling` with `rope_type` or `type` (before), `rope_theta` inside
or beside it. Kinds: default, linear, dynamic (NTK), llama3, yarn (arXiv 2309.00071), longrope (arXiv 2402.13753; only
up to the original length, whose factors are the short ones).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SPELLINGS = {"su": "longrope"}
_ORIGINAL = ("llama3", "yarn", "longrope")
"""Kinds that stretch an original length of their own."""


class Unsupported(ValueError):
    """A model that would be served wrong: the message names the architecture, config field or weight format."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding parameters.

    `factor` stretches the context beyond `original_length` tokens; `low_freq`/`high_freq` belong to llama3,
    `beta_fast`/`beta_slow`/`truncate` to yarn, `divisors`, one for each pair's frequency, to longrope.
    `attention_factor` multiplies cosine and sine (yarn and longrope, else 1); `mscale_all_dim` is DeepSeek's. The first
    `share` of a head is rotated, the rest left as it is.
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
    mscale_all_dim: float = 0.0
    share: float = 1.0
    divisors: tuple[float, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, Any], max_positions: int, *, partial: bool = False) -> Rope:
        """The rope of a config.json; raises Unsupported for an unknown kind or a field that is missing, and, unless the
        family is known to rotate heads in part (`partial`), for a partial one."""
        field, params = _params(config)
        given = params.get("rope_type") or params.get("type") or "default"
        kind = _SPELLINGS.get(given, given)
        if kind not in KINDS:
            raise Unsupported(f"rope type {kind!r} ({field}) is not supported; known: {', '.join(KINDS)}")
        share = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        share = 1.0 if share is None else share
        if not isinstance(share, int | float) or not 0 < share <= 1 or (share != 1 and not partial):
            raise Unsupported(f"partial_rotary_factor {share} is not supported ({'0 to 1' if partial else 'only 1'})")
        theta = float(params.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        if kind == "default":
            return cls(theta=theta, original_length=max_positions, share=float(share))
        return replace(_scaled(cls, kind, theta, field, params, config, max_positions), share=float(share))

    @property
    def score_factor(self) -> float:
        """What DeepSeek's models multiply all scores by, beside their scale."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def rotated(self, head_dim: int) -> int:
        """How many of a head's values are rotated."""
        return int(head_dim * self.share)

    def check(self, head_dim: int) -> None:
        """Raise Unsupported for heads of `head_dim` values that cannot be rotated so."""
        rotated = self.rotated(head_dim)
        if rotated % 2 or not rotated:
            raise Unsupported(f"partial_rotary_factor {self.share} rotates {rotated} of {head_dim} values: not even")
        if self.divisors and len(self.divisors) != rotated // 2:
            raise Unsupported(f"rope short_factor has {len(self.divisors)} numbers, heads have {rotated // 2} pairs")

    def reach(self, max_positions: int) -> int:
        """Tokens of context: the model's own `max_positions`, stretched by a linear, dynamic or yarn rope. A longrope
        ends at its original length: beyond it every earlier key would have to be turned anew."""
        if self.kind in ("linear", "dynamic", "yarn"):
            return max(max_positions, int(self.original_length * self.factor))
        return min(max_positions, self.original_length) if self.kind == "longrope" else max_positions


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
    if kind in _ORIGINAL:
        outer = config.get("original_max_position_embeddings")
        original = int(outer or params.get("original_max_position_embeddings") or max_positions)
    factor = params.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
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
        attention_factor=_attention_factor(kind, float(names["factor"] or 1.0), original, params),
        truncate=bool(params.get("truncate", True)),
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
        divisors=_divisors(field, params) if kind == "longrope" else (),
    )


def _divisors(field: str, params: Mapping[str, Any]) -> tuple[float, ...]:
    short = params.get("short_factor")
    if not isinstance(short, list) or not all(isinstance(one, int | float) and one > 0 for one in short):
        raise Unsupported(f"{field}.short_factor of rope type 'longrope' must be a list of numbers above 0")
    return tuple(map(float, short))


def _attention_factor(kind: str, factor: float, original: int, params: Mapping[str, Any]) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    given = params.get("attention_factor")
    if given is not None:
        return float(given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if scale and all_dim:
        return _mscale(factor, float(scale)) / _mscale(factor, float(all_dim))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
