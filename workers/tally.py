"""What a group has done since it came up, in numbers: requests, tokens, steps by their size. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.plan import StepRow


@dataclass(slots=True)
class Counters:
    """Totals, named as in GroupReport. `ooms` counts the steps that found no memory, not those dropped because they
    built on one."""

    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    ooms: int = 0
    expired_asked: int = 0
    lost_to_scope: int = 0


@dataclass(slots=True)
class _Steps:
    steps: int = 0
    seconds: float = 0.0
    sampled: int = 0
    computed: int = 0


@dataclass(slots=True)
class StepTally:
    """Steps by their number of rows, rounded up to a power of two; `latest` is the longest since it was last set."""

    latest: float = 0.0
    _sizes: dict[int, _Steps] = field(default_factory=dict)

    def add(self, rows: int, seconds: float, sampled: int, computed: int) -> None:
        """A step with `rows` sequences ran."""
        steps = self._sizes.setdefault(1 << (rows - 1).bit_length(), _Steps())
        steps.steps += 1
        steps.seconds += seconds
        steps.sampled += sampled
        steps.computed += computed
        self.latest = max(self.latest, seconds)

    def rows(self) -> tuple[StepRow, ...]:
        """By size, the smallest first."""
        sizes = sorted(self._sizes.items())
        return tuple(StepRow(size, s.steps, s.seconds, s.sampled, s.computed) for size, s in sizes)


@dataclass(slots=True)
class Doublings:
    """How many values lay in [2**i, 2**(i+1))."""

    counts: list[int] = field(default_factory=list)

    def add(self, value: int) -> None:
        """`value` is at least 1."""
        place = value.bit_length() - 1
        self.counts.extend([0] * (place + 1 - len(self.counts)))
        self.counts[place] += 1
