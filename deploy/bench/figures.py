"""Samples -> figures: rates, percentiles, errors by kind. Plain numbers; knows neither HTTP nor tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bench.client import Sample


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one quantity, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """The spread of `seconds`; None when there are none."""
        values = sorted(value * 1e3 for value in seconds)
        if not values:
            return None
        return cls(sum(values) / len(values), *(percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered values lie, interpolated between neighbours."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Figures:
    """One server at one level of load. Rates are per second of wall time, over the requests that succeeded."""

    server: str
    level: str
    requests: int
    failed: int
    errors: tuple[tuple[str, int], ...]
    wall_s: float
    output_tok_s: float
    total_tok_s: float
    request_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    total_ms: Spread | None

    @classmethod
    def of(cls, server: str, level: str, samples: Sequence[Sample], wall_s: float) -> Figures:
        """Sum up `samples`, which took `wall_s` seconds together."""
        good = [sample for sample in samples if sample.error is None]
        output, prompt = sum(s.output_tokens for s in good), sum(s.prompt_tokens for s in good)
        errors = Counter(sample.error for sample in samples if sample.error is not None)
        return cls(
            server=server,
            level=level,
            requests=len(samples),
            failed=len(samples) - len(good),
            errors=tuple(errors.most_common(3)),
            wall_s=wall_s,
            output_tok_s=output / wall_s,
            total_tok_s=(output + prompt) / wall_s,
            request_s=len(good) / wall_s,
            output_tokens=output,
            prompt_tokens=prompt,
            cached_tokens=sum(s.cached_tokens for s in good),
            ttft_ms=Spread.of(s.ttft for s in good if s.ttft is not None),
            tpot_ms=Spread.of(s.tpot for s in good if s.tpot is not None),
            gap_ms=Spread.of(gap for s in good for gap in s.gaps),
            total_ms=Spread.of(s.total for s in good),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values, numbers rounded to 3 digits behind the point."""
        return rounded(asdict(self))


def rounded(value: Any) -> Any:
    """`value` with every number in it rounded to 3 digits behind the point."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
