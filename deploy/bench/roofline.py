"""How much of what the machine allows the engine reaches, over several starts: jobs for `deploy.bench.solo`, and what
they gave as medians, ranges and a table. Loads no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deploy.bench.client import ServerError
from deploy.bench.figures import rounded
from deploy.bench.standings import Range
from deploy.tables import plain_table
from deploy.terminal import Tick
from workers.settings import GroupSettings

Start = Mapping[str, Any]
"""What one `python -m deploy.bench.solo` gave."""
Run = Callable[[dict[str, Any]], Start]
PHASES = ("prefill", "decode", "mixed", "all")
_SAID = 1500


@dataclass(frozen=True, slots=True)
class Reached:
    """One phase at one level. `rate` counts computed tokens in prefill, output tokens elsewhere, per second; `allowed`
    is the same at the machine's peaks; `time` the share of the level's time that the phase took."""

    clients: int
    phase: str
    rate: Range
    allowed: Range
    share: Range
    step_ms: Range
    time: Range


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The peaks of all starts: operations per second in the linears' format and in that of the rest, bytes read per
    second."""

    linear: Range
    other: Range
    read: Range

    def text(self) -> str:
        """A line for people."""
        linear, other = self.linear.text(3, 1e12), self.other.text(3, 1e12)
        apart = f", {other} outside the linears" if other != linear else ""
        return f"multiply-adds {linear} × 10¹²/s{apart}, memory {self.read.text(1, 1e9)} GB/s"


def measure(
    settings: GroupSettings,
    *,
    levels: Sequence[int],
    prompt_tokens: int,
    max_tokens: int,
    seed: int,
    starts: int,
    tick: Tick,
    run: Run | None = None,
) -> list[Start]:
    """`starts` processes, one after the other, each with all `levels`. Raises ServerError when one fails."""
    job = {"settings": settings.plain, "levels": list(levels), "seed": seed}
    job |= {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    found = []
    for number in range(starts):
        tick("the engine alone", number, starts)
        found.append((run or in_a_process)(job))
    return found


def in_a_process(job: dict[str, Any]) -> Start:
    """Run `job` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.bench.solo"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    if done.returncode:
        raise ServerError(f"the engine failed:\n{done.stderr.strip()[-_SAID:]}")
    start: Start = json.loads(done.stdout.splitlines()[-1])
    return start


def reached(starts: Sequence[Start]) -> list[Reached]:
    """A row per level and phase, in the order of the levels."""
    levels: dict[int, list[Mapping[str, Any]]] = {}
    for start in starts:
        for level in start["levels"]:
            levels.setdefault(level["clients"], []).append(level["phases"])
    return [
        _reached(clients, phase, both)
        for clients, found in levels.items()
        for phase in PHASES
        if (both := [(phases[phase], phases["all"]) for phases in found if phase in phases])
    ]


def ceiling(starts: Sequence[Start]) -> Ceiling:
    """Over all levels of all starts. Raises ServerError when there is none."""
    every = [level["peaks"] for start in starts for level in start["levels"]]
    spans = [Range.of(peaks[name] for peaks in every) for name in ("linear", "other", "read")]
    linear, other, read = spans
    if not (linear and other and read):
        raise ServerError("no level was measured")
    return Ceiling(linear, other, read)


def first_tokens(starts: Sequence[Start]) -> dict[int, Range]:
    """Milliseconds to the first token, by clients: the range of the starts' medians."""
    found: dict[int, list[float]] = {}
    for start in starts:
        for level in start["levels"]:
            found.setdefault(level["clients"], []).append(1e3 * level["ttft_s"])
    return {clients: _range(values) for clients, values in found.items()}


def reached_table(rows: Sequence[Reached]) -> Table:
    """Medians of the starts; of the share of the roofline the range too."""
    columns = ("clients", "phase", "share", "tokens/s", "allowed", "ms/step", "time")
    table = plain_table("The engine alone and what this machine allows: medians (lowest-highest)", *columns)
    table.columns[1].justify = "left"
    before = 0
    for row in rows:
        rates = (f"{row.rate.median:.0f}", f"{row.allowed.median:.0f}", f"{row.step_ms.median:.1f}")
        clients = "" if row.clients == before else str(row.clients)
        table.add_row(clients, row.phase, row.share.text(2), *rates, f"{row.time.median:.2f}")
        before = row.clients
    return table


def as_json(starts: Sequence[Start]) -> dict[str, Any]:
    """All of it as plain values."""
    first = {key: starts[0][key] for key in ("kernels", "threads", "meter")}
    waits = {str(clients): asdict(found) for clients, found in first_tokens(starts).items()}
    rows = [asdict(row) for row in reached(starts)]
    return first | rounded({"peaks": asdict(ceiling(starts)), "ttft_ms": waits, "rows": rows})


def _reached(clients: int, phase: str, found: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Reached:
    counted = "tokens" if phase == "prefill" else "sampled"
    return Reached(
        clients,
        phase,
        rate=_range([mine[counted] / mine["seconds"] for mine, _ in found]),
        allowed=_range([mine[counted] / mine["least_s"] for mine, _ in found]),
        share=_range([mine["least_s"] / mine["seconds"] for mine, _ in found]),
        step_ms=_range([1e3 * mine["seconds"] / mine["steps"] for mine, _ in found]),
        time=_range([mine["seconds"] / whole["seconds"] for mine, whole in found]),
    )


def _range(values: Sequence[float]) -> Range:
    found = Range.of(values)
    assert found is not None
    return found
