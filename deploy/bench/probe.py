"""What a service's own status says over a stretch of time: how full its pools were, how the ladder moved.

`Probe` looks once a second in a thread of its own while something else runs; `summary` is pure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

Status = Mapping[str, Any]
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over time and over the groups of a model. `held` and `committed` are shares of the blocks, `levels` shares
    of the time; the rest happened meanwhile. `recomputed` is a share of what was computed."""

    looks: int
    held: float
    committed: float
    levels: dict[str, float]
    level_changes: int
    preemptions: int
    output_tokens: int
    recomputed: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


class Probe:
    """Use as a context manager around what is to be watched; `looks` are the statuses, in order. A look that fails is
    left out."""

    def __init__(self, look: Callable[[], Status], failures: tuple[type[Exception], ...]) -> None:
        self.looks: list[Status] = []
        self._look = look
        self._failures = failures
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(*self._failures):
                self.looks.append(self._look())
            if self._done.wait(PERIOD_S):
                return


def summary(looks: Sequence[Status], model: str | None = None) -> Summary | None:
    """Of the groups that serve `model` (None: all). None when nothing was seen."""
    rows = [[row for row in look["groups"] if model is None or model in row["models"]] for look in looks]
    every = [row for look in rows for row in look if row["pool"]]
    if not every:
        return None
    levels = [str(row.get("level", "normal")) for row in every]
    computed = _grown(rows, "computed_tokens")
    return Summary(
        looks=len(looks),
        held=_mean([row["pool"]["held"] / row["blocks"] for row in every]),
        committed=_mean([row["committed"] / row["blocks"] for row in every]),
        levels={level: levels.count(level) / len(levels) for level in dict.fromkeys(levels)},
        level_changes=_grown(rows, "changes"),
        preemptions=_grown(rows, "preemptions"),
        output_tokens=_grown(rows, "output_tokens"),
        recomputed=_grown(rows, "recomputed_tokens") / computed if computed else 0.0,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _grown(rows: Sequence[Sequence[Mapping[str, Any]]], key: str) -> int:
    """By how much a counter of the groups grew from the first look to the last."""
    first, last = ({row["group"]: row.get(key, 0) for row in rows[at]} for at in (0, -1))
    return sum(max(0, last[name] - first.get(name, 0)) for name in last)
