"""`tidegate status --watch`: a coordinator's status as a picture that changes every second.

`frame` is pure: it draws one status, with rates from the one before it. `watch` shows frames on a terminal in place,
and elsewhere one below the other. Neither knows where a status comes from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.tables import age, line_table, plain_table

PERIOD_S = 1.0
BAR = 24
_COLOURS = {"normal": "green", "trim": "cyan", "shrink": "yellow", "compact": "magenta", "refuse": "red"}
_PARTS = (("held", "█", "blue"), ("dirty", "▒", "red"), ("idle", "▓", "cyan"), ("free", "░", "bright_black"))
"""Blocks by state: how each is drawn in a bar."""
_COUNTERS = ("output_tokens", "preemptions", "prompt_tokens", "cached_tokens")

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shot:
    """A status, and when it was taken, in seconds."""

    status: Status
    at: float


def watch(
    look: Callable[[], Status],
    console: Console,
    frames: int | None = None,
    failures: tuple[type[Exception], ...] = (),
) -> None:
    """Show what `look` gives every second, `frames` times (None: until interrupted). When it raises one of `failures`,
    the last frame stays and says so; anything else, and a failure of the very first look, ends it."""
    pause, before = threading.Event(), None
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for number in count(1):
            shot, note = before, ""
            try:
                shot = Shot(look(), time.monotonic())
            except failures as error:
                if before is None:
                    raise
                note = f"as of {time.monotonic() - before.at:.0f} s ago: {error}"
            assert shot is not None
            picture = Group(frame(shot, before), Text(note, style="red")) if note else frame(shot, before)
            if console.is_terminal:
                live.update(picture, refresh=True)
            else:
                console.print(picture)
            before = shot
            if number == frames:
                return
            pause.wait(PERIOD_S)


def frame(shot: Shot, before: Shot | None = None) -> RenderableType:
    """One picture. Rates are those since `before`; without it they are left open."""
    status = shot.status
    seconds = shot.at - before.at if before and shot.at > before.at else None
    old = before.status if before else {}
    title = Text(f"{status.get('service', 'tidegate')} at {status.get('url') or 'an unknown URL'}", style="bold")
    parts: list[RenderableType] = [title, _groups(status, old, seconds)]
    if status.get("line"):
        parts.append(line_table(status))
    parts.append(_totals(status, old, seconds))
    return Group(*parts)


def _groups(status: Status, old: Status, seconds: float | None) -> RenderableType:
    columns = ("group", "model", "state", "level", "pool", "held", "committed", "idle", "free", "driven by")
    table = plain_table("Groups", *columns, "slots", "waiting", "tok/s", "preempted", "hits")
    for column in (1, 2, 3, 4, 9):
        table.columns[column].justify = "left"
    earlier = {(row["group"], row["epoch"]): row for row in old.get("groups", ())}
    for row in sorted(status.get("groups", ()), key=lambda row: (row["models"], row["group"])):
        rates = _rates(row, earlier.get((row["group"], row["epoch"])), seconds)
        pool = row["pool"] or {}
        table.add_row(
            row["group"],
            ", ".join(row["models"][:1]),
            row["state"],
            _level(row),
            pool_bar(pool),
            *(_share(pool.get("held"), row), _share(row["committed"], row)),
            *(_share(pool.get(name), row) for name in ("idle", "free")),
            _drive(row),
            f"{row['running']}/{row['max_num_seqs']}",
            str(row["waiting"]),
            _number(rates.get("output_tokens")),
            _number(rates.get("preemptions"), digits=1),
            _hits(row, rates),
        )
    return table


def pool_bar(pool: Mapping[str, int], width: int = BAR) -> Text:
    """The pool as a bar of `width` characters: held, dirty, idle, free. What is there at all gets a character."""
    total = sum(pool.get(name, 0) for name, _, _ in _PARTS)
    bar = Text()
    if not total:
        return bar
    cells = {name: max(bool(pool.get(name)), pool.get(name, 0) * width // total) for name, _, _ in _PARTS}
    widest = max(cells, key=lambda name: cells[name])
    cells[widest] += width - sum(cells.values())
    for name, character, colour in _PARTS:
        bar.append(character * cells[name], style=colour)
    return bar


def _level(row: Mapping[str, Any]) -> Text:
    """The row of the ladder, and for how long."""
    level = row.get("level")
    if level is None:
        return Text("-")
    since = f" {age(row['level_s'])}" if "level_s" in row else ""
    return Text(f"{level}{since}", style=_COLOURS.get(level, ""))


def _drive(row: Mapping[str, Any]) -> str:
    """The term that drives the level, and where both terms stand."""
    terms = ", ".join(f"{term} {share:.0%}" for term, share in row.get("drives", {}).items())
    return f"{row['driven_by']}: {terms}" if row.get("driven_by") else terms or "-"


def _totals(status: Status, old: Status, seconds: float | None) -> Text:
    """Grants and refusals, and how many a second."""
    grants = dict(status.get("grants", {}))
    given = grants.pop("given", 0)
    parts = [f"grants open {sum(grants.values())}, given {given}{_per_second(given, old, seconds, 'grants', 'given')}"]
    refused = status.get("refused", {})
    for code, number in sorted(refused.items()):
        parts.append(f"{code} {number}{_per_second(number, old, seconds, 'refused', code)}")
    if not refused:
        parts.append("nothing refused")
    return Text(" · ".join(parts))


def _per_second(now: float, old: Status, seconds: float | None, part: str, key: str) -> str:
    if seconds is None:
        return ""
    return f" ({max(0.0, now - old.get(part, {}).get(key, 0)) / seconds:.1f}/s)"


def _rates(row: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float | None) -> dict[str, float]:
    """What the group's counters grew by, per second."""
    if old is None or seconds is None:
        return {}
    known = (name for name in _COUNTERS if name in row and name in old)
    return {name: max(0, row[name] - old[name]) / seconds for name in known}


def _hits(row: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    """The share of prompt tokens that the cache had: of now, or since the start when nothing was asked now."""
    asked = rates.get("prompt_tokens")
    if asked:
        return f"{rates['cached_tokens'] / asked:.0%}"
    return f"{row['cached_tokens'] / row['prompt_tokens']:.0%}" if row.get("prompt_tokens") else "-"


def _share(blocks: int | None, row: Mapping[str, Any]) -> str:
    return "-" if blocks is None else f"{blocks} ({blocks / max(1, row['blocks']):.0%})"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
