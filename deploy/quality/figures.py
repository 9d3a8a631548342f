"""Figures: what a KV precision costs, each with its standard error, and the limits that it has to keep.

Plain values: from one number per token to means, from means to a verdict in words. Knows neither models nor texts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

BLOCK = 64
"""Tokens that count as one observation: within a sentence what is hard for one token is hard for its neighbours."""
FEWEST = 2 * BLOCK + 1
"""Tokens of a text that something can be said about."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, in whatever its values are in."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """From two values at least, taken as independent."""
        return cls(statistics.fmean(values), _deviation(values) / math.sqrt(len(values)))

    @classmethod
    def blocked(cls, values: Sequence[float], block: int = BLOCK) -> Self:
        """From one value per token of a text, two at least. The error comes from the means of blocks of about `block`
        tokens (two blocks at least): values that lie near each other may depend on each other, blocks hardly do."""
        count = max(2, len(values) // block)
        edges = [index * len(values) // count for index in range(count + 1)]
        means = [statistics.fmean(values[first:last]) for first, last in pairwise(edges)]
        return cls(statistics.fmean(values), _deviation(means) / math.sqrt(count))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a precision costs against the same model with its KV cache unquantised, over the same `tokens`, paired.

    `kl`: nats per token by which the next-token distribution moves away, from the full logits. `top1`: the share of
    tokens whose most likely successor stays the same. `rise` is the relative change of `perplexity`: 0.01 is 1 %.
    """

    kl: Estimate
    top1: Estimate
    perplexity: float
    rise: Estimate
    tokens: int

    @classmethod
    def of(cls, kl: Sequence[float], same: Sequence[bool], before: Sequence[float], after: Sequence[float]) -> Self:
        """From one value per token: divergence, whether the first choice is the same, and the negative log likelihood
        without and with the precision, all in nats."""
        above = Estimate.blocked([mine - theirs for mine, theirs in zip(after, before, strict=True)])
        times = _exp(above.mean)
        return cls(
            kl=Estimate.blocked(kl),
            top1=Estimate.blocked([float(each) for each in same]),
            perplexity=_exp(statistics.fmean(after)),
            rise=Estimate(times - 1, times * above.error),
            tokens=len(kl),
        )

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Self:
        """What `plain` was made of."""
        estimates = {name: Estimate(**plain[name]) for name in ("kl", "top1", "rise")}
        return cls(**estimates, perplexity=plain["perplexity"], tokens=plain["tokens"])

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a precision may cost, each figure as `Cost` has it.

    The defaults lie between what is harmless and what hurts, as SmolLM2 shows it: INT8 moves the distribution by 0.0007
    nats, E4M3 and values in INT4 by 0.007 to 0.008, E5M2 by 0.016 to 0.025, keys in INT4 by 0.08 to 0.1, at which one
    token in five has another first choice and a text goes another way after half a sentence. 3 % of perplexity is five
    standard errors of a check on 1,024 tokens for all of them but the last, so that chance refuses nothing.
    """

    max_kl: float = 0.02
    min_top1: float = 0.9
    max_perplexity_rise: float = 0.03

    def faults(self, cost: Cost) -> list[str]:
        """What of `cost` is beyond the limits, in words with both numbers; empty when it passes. Not a number is."""
        found = []
        if not cost.kl.mean <= self.max_kl:
            found.append(f"KL {cost.kl.mean:.4f} is above max_kl {self.max_kl:g}")
        if not cost.top1.mean >= self.min_top1:
            found.append(f"top-1 agreement {cost.top1.mean:.3f} is below min_top1 {self.min_top1:g}")
        if not cost.rise.mean <= self.max_perplexity_rise:
            found.append(
                f"perplexity rises by {cost.rise.mean:.1%}, above max_perplexity_rise {self.max_perplexity_rise:g}"
            )
        return found


def parted(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Estimate:
    """The mean number of tokens after which two greedy continuations of the same prompts, two at least, part: their
    whole length where they never do."""
    return Estimate.of([float(common(mine, theirs)) for mine, theirs in zip(before, after, strict=True)])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _exp(mean: float) -> float:
    """Infinite for what a float cannot hold: a cache that makes nonsense of a text still gets its verdict."""
    return math.exp(mean) if not mean >= 700 else math.inf


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation; not a number where some value is none, or infinite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
