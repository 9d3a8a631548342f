"""From several starts of several servers to medians, ranges and ratios, as values and as a table. Plain numbers: knows
neither processes nor HTTP.

Only servers of the same turn are set against each other: a machine that slows down does so for all of a turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from deploy.bench.figures import Figures, rounded
from deploy.tables import plain_table


@dataclass(frozen=True, slots=True)
class Turn:
    """One load on one start of one server. `cores` are those that its processes kept busy, by name, this program's own
    among them; `counted` is by how much its counters grew."""

    server: str
    load: str
    start: int
    figures: Figures
    cores: Mapping[str, float] = field(default_factory=dict)
    counted: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = {key: value for key, value in self.figures.as_json().items() if key not in ("server", "level")}
        facts = {"server": self.server, "load": self.load, "start": self.start}
        return {**facts, **figures, "cores": rounded(dict(self.cores)), "counted": rounded(dict(self.counted))}


@dataclass(frozen=True, slots=True)
class Range:
    """Of the values of several starts."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Range | None:
        """None when there is no value."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def text(self, digits: int, unit: float = 1.0) -> str:
        """ "203.1 (198.0-210.4)", in multiples of `unit`."""
        median, low, high = (f"{value / unit:.{digits}f}" for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low}-{high})"


@dataclass(frozen=True, slots=True)
class Standing:
    """One server under one load over all its starts. Times in ms, medians of each start; `failed` requests of all."""

    load: str
    server: str
    starts: int
    failed: int
    output_tok_s: Range | None
    ttft_ms: Range | None
    ttft_p99_ms: Range | None
    tpot_ms: Range | None
    cores: Mapping[str, float]
    counted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The first server against another under one load, turn by turn: above 1 the first gives more tokens; below 1 its
    first token comes sooner."""

    load: str
    first: str
    other: str
    output_tok_s: Range | None
    ttft_ms: Range | None

    def text(self) -> str:
        """A line for people."""
        parts = [f"{name} {found.text(2)} ×" for name, found in self._named() if found]
        return f"{self.load}: {self.first} against {self.other}: {', '.join(parts) or 'nothing to compare'}"

    def _named(self) -> tuple[tuple[str, Range | None], ...]:
        return ("output tokens/s", self.output_tok_s), ("TTFT p50", self.ttft_ms)


def standings(turns: Sequence[Turn]) -> list[Standing]:
    """One for each load and server, in the order of their first turns."""
    groups: dict[tuple[str, str], list[Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.load, turn.server), []).append(turn)
    order = {load: place for place, load in enumerate(dict.fromkeys(turn.load for turn in turns))}
    return [_standing(*key, groups[key]) for key in sorted(groups, key=lambda key: order[key[0]])]


def ratios(turns: Sequence[Turn], first: str) -> list[Ratio]:
    """`first` against every other server, for each load, over the turns in which both have figures."""
    found = {(turn.load, turn.server, turn.start): turn.figures for turn in turns if turn.figures.output_tokens}
    pairs: dict[tuple[str, str], list[tuple[Figures, Figures]]] = {}
    for (load, server, start), other in found.items():
        own = found.get((load, first, start))
        if server != first and own:
            pairs.setdefault((load, server), []).append((own, other))
    return [Ratio(load, first, server, *_ratio(both)) for (load, server), both in pairs.items()]


def standings_table(rows: Sequence[Standing]) -> Table:
    """Medians, with the range of the starts behind them."""
    columns = ("load", "server", "starts", "failed", "out tok/s", "TTFT p50", "p99", "TPOT p50")
    table = plain_table("Medians of the starts (lowest-highest), times in ms", *columns)
    table.columns[1].justify = "left"
    before = ""
    for row in rows:
        spans = ((row.output_tok_s, 1), (row.ttft_ms, 0), (row.ttft_p99_ms, 0), (row.tpot_ms, 1))
        values = [span.text(digits) if span else "-" for span, digits in spans]
        table.add_row("" if row.load == before else row.load, row.server, str(row.starts), str(row.failed), *values)
        before = row.load
    return table


def remarks(rows: Sequence[Standing], least: float = 0.02) -> list[str]:
    """What else there is to say of each: who kept the cores busy (at least `least` of one), what was counted."""
    lines = []
    for row in rows:
        busy = ", ".join(f"{name} {share:.2f}" for name, share in row.cores.items() if share >= least)
        counted = ", ".join(f"{name} {value:g}" for name, value in row.counted.items())
        said = [f"cores: {busy}"] * bool(busy) + [counted] * bool(counted)
        lines += [f"{row.load}, {row.server}: {'; '.join(said)}"] * bool(said)
    return lines


def as_json(turns: Sequence[Turn], first: str) -> dict[str, Any]:
    """All of it as plain values."""
    rows, pairs = [asdict(row) for row in standings(turns)], [asdict(pair) for pair in ratios(turns, first)]
    return {"standings": rounded(rows), "ratios": rounded(pairs), "turns": [turn.as_json() for turn in turns]}


def _ratio(pairs: Sequence[tuple[Figures, Figures]]) -> tuple[Range | None, Range | None]:
    """Of output rates and of TTFT p50."""
    waits = [(own.ttft_ms, other.ttft_ms) for own, other in pairs]
    return (
        Range.of(own.output_tok_s / other.output_tok_s for own, other in pairs),
        Range.of(own.p50 / other.p50 for own, other in waits if own and other),
    )


def _standing(load: str, server: str, turns: Sequence[Turn]) -> Standing:
    figures = [turn.figures for turn in turns]
    good = [row for row in figures if row.output_tokens]
    return Standing(
        load=load,
        server=server,
        starts=len(turns),
        failed=sum(row.failed for row in figures),
        output_tok_s=Range.of(row.output_tok_s for row in good),
        ttft_ms=Range.of(row.ttft_ms.p50 if row.ttft_ms else None for row in good),
        ttft_p99_ms=Range.of(row.ttft_ms.p99 if row.ttft_ms else None for row in good),
        tpot_ms=Range.of(row.tpot_ms.p50 if row.tpot_ms else None for row in good),
        cores=_medians([turn.cores for turn in turns]),
        counted=_medians([turn.counted for turn in turns]),
    )


def _medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name; what one start does not have counts as nothing there. The largest first."""
    names = dict.fromkeys(name for each in values for name in each)
    found = {name: statistics.median(each.get(name, 0.0) for each in values) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
