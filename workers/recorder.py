"""Flight recorder: the last plans, results and events of a group, bounded, dumped when something goes wrong.

Plans hold the token ids of their rows, because a replay needs them: a dump contains parts of prompts and outputs and
belongs where those may be. They are logged nowhere else. No namespace and no text is kept. Time comes in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from workers.plan import Bend, Draw, Group, Penalties, Row, Score, StepPlan, StepResult

Line = dict[str, Any]
"""One entry, ready for JSON: `at` (seconds), `kind` ("plan", "result" or an event's name), and what belongs to it."""
_OTHERS = 4
"""Results and events are kept for each plan, about."""


class Recorder:
    """Keeps at most `steps` plans, with at most `ids` token and block ids in them (of one layer group), and the results
    and events of that time. Written by the step thread; `dump` may be called from any."""

    def __init__(self, steps: int = 256, ids: int = 1_000_000) -> None:
        self._steps = steps
        self._ids = ids
        self._lock = threading.Lock()
        self._ring: deque[tuple[float, StepPlan | StepResult | Line, int]] = deque()
        self._plans = 0
        self._weight = 0

    def plan(self, plan: StepPlan, now: float) -> None:
        """`plan` is about to be launched."""
        weight = plan.tokens + sum([len(row.tables[0]) for row in plan.rows])
        weight += sum([len(row.draw.bend.output) for row in plan.rows if row.draw is not None and row.draw.bend])
        with self._lock:
            self._ring.append((now, plan, weight))
            self._plans += 1
            self._weight += weight
            self._shrink()

    def result(self, result: StepResult, now: float) -> None:
        """`result` has come."""
        with self._lock:
            self._ring.append((now, result, 0))

    def note(self, kind: str, now: float, **facts: str | float | bool | None) -> None:
        """Something else happened."""
        with self._lock:
            self._ring.append((now, {"kind": kind, **facts}, 0))
            self._shrink()

    def dump(self) -> list[Line]:
        """All of it, the oldest first."""
        with self._lock:
            entries = list(self._ring)
        return [{"at": round(at, 6), **_encode(entry)} for at, entry, _ in entries]

    def _shrink(self) -> None:
        most = _OTHERS * self._steps
        while self._plans > self._steps or (self._weight > self._ids and self._plans > 1) or len(self._ring) > most:
            _, entry, weight = self._ring.popleft()
            self._plans -= isinstance(entry, StepPlan)
            self._weight -= weight


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step run again: its number in the recording, the tokens recorded (None: no result, or it was dropped), and
    those that came out now (None: it was dropped now)."""

    step: int
    recorded: tuple[int, ...] | None
    tokens: tuple[int, ...] | None


def replay(lines: Iterable[Mapping[str, Any]], group: Group) -> list[Replayed]:
    """Run the plans of a dump over a fresh `group`, one at a time. Whatever the plans make it raise comes through.

    A plan whose tokens are still missing when the recording begins (they come from a step before) is left out. A
    recording that begins in the middle reads blocks that nobody has written: the group must put up with it.
    """
    recorded: dict[int, tuple[int, ...]] = {}
    plans: list[StepPlan] = []
    for line in lines:
        if line["kind"] == "plan":
            plans.append(_decode(line))
        elif line["kind"] == "result" and not line["dropped"]:
            recorded[line["step"]] = tuple(line["tokens"])
    done: list[Replayed] = []
    drops = plans[0].drops if plans else 0
    for plan in plans:
        if not done or done[-1].step != plan.step - 1:
            known = _fill(plan, recorded.get(plan.step - 1))
            if known is None:
                continue
            plan = known
        result = group.wait(group.launch(replace(plan, step=len(done) + 1, drops=plan.drops - drops)))
        done.append(Replayed(plan.step, recorded.get(plan.step), None if result.dropped else result.tokens))
    return done


def _fill(plan: StepPlan, before: tuple[int, ...] | None) -> StepPlan | None:
    """`plan` without a reference to the step before, which sampled `before`; None when that is not known."""
    if all(row.source is None for row in plan.rows):
        return plan
    if before is None:
        return None
    rows = (row if row.source is None else replace(row.filled(before[row.source]), source=None) for row in plan.rows)
    return replace(plan, rows=tuple(rows))


def _encode(entry: StepPlan | StepResult | Line) -> Line:
    if isinstance(entry, StepPlan):
        rows = [
            [
                list(row.tokens),
                row.start,
                [list(table) for table in row.tables],
                astuple(row.draw) if row.draw else None,
                row.source,
                astuple(row.score) if row.score else None,
            ]
            for row in entry.rows
        ]
        turns = {"copy": [list(pair) for pair in entry.copy], "zero": list(entry.zero)}
        return {"kind": "plan", "step": entry.step, "drops": entry.drops, "rows": rows, **turns}
    if isinstance(entry, StepResult):
        state = {"seconds": entry.seconds, "dropped": entry.dropped, "short": entry.short}
        return {"kind": "result", "step": entry.step, "tokens": list(entry.tokens), **state}
    return entry


def _draw(values: Sequence[Any]) -> Draw:
    draw = Draw(*values)
    if draw.bend is None:
        return draw
    (presence, frequency, repetition, bias, least), *tokens = values[-1]
    penalties = Penalties(presence, frequency, repetition, tuple((id, value) for id, value in bias), least)
    return replace(draw, bend=Bend(penalties, *map(tuple, tokens)))


def _decode(line: Mapping[str, Any]) -> StepPlan:
    rows = [
        Row(
            tuple(tokens),
            start,
            tuple(tuple(table) for table in tables),
            _draw(draw) if draw else None,
            source,
            Score(score[0], tuple(score[1]), score[2]) if score else None,
        )
        for tokens, start, tables, draw, source, score in line["rows"]
    ]
    copy = tuple((source, target) for source, target in line["copy"])
    return StepPlan(line["step"], tuple(rows), copy, tuple(line["zero"]), line["drops"])
