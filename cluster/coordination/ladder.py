"""The ladder of degradation of one group: a level that moves one row at a time, and what it lets a step hold.

Pure: signals and time come in, a level and limits come out. Each term has a threshold to come up and a lower one to go
down, and each level lasts for a while, so that nothing flaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cluster.coordination.terms import Thresholds
from workers.plan import Limits


class Level(IntEnum):
    """Rows of the ladder. COMPACT keeps its place until there is something to compact, and is never entered."""

    NORMAL = 0
    TRIM = 1
    SHRINK = 2
    COMPACT = 3
    REFUSE = 4

    @property
    def label(self) -> str:
        """Its name for people and programs."""
        return self.name.lower()

    @property
    def row(self) -> int:
        """Its number among the rows that are entered."""
        return self.value if self < Level.COMPACT else self.value - 1


_ROWS = (Level.NORMAL, Level.TRIM, Level.SHRINK, Level.REFUSE)


@dataclass(frozen=True, slots=True)
class Signals:
    """What a group looks like: the share of its blocks that is `held`, the share that its live requests will hold at
    their peak (`growth`, above 1 when that does not fit), and whether the line before it is full."""

    held: float
    growth: float
    line_full: bool = False


class Ladder:
    """`term` is what drives the level: "held", "growth", "line", or "" at normal. `changes` counts moves."""

    def __init__(self, thresholds: Thresholds, now: float) -> None:
        self.level = Level.NORMAL
        self.signals = Signals(0.0, 0.0)
        self.changes = 0
        self.thresholds = thresholds
        self._since = now
        self._moved = False
        self._seconds = dict.fromkeys(Level, 0.0)
        self._tight = self._growing = self._brimming = False

    @property
    def shrinks(self) -> bool:
        """Whether finished slots stay empty. A level lasts for its dwell even where its cause has passed; what it
        costs does not."""
        return self._growing and self.level >= Level.SHRINK

    @property
    def term(self) -> str:
        if self.level is Level.NORMAL:
            return ""
        if self.level is Level.REFUSE:
            return "line"
        return "growth" if self._growing else "held"

    def update(self, signals: Signals, now: float) -> Level:
        """Take in the latest signals; move by at most one row."""
        at = self.thresholds
        self.signals = signals
        self._tight = signals.held >= (at.trim_down if self._tight else at.trim_up)
        if signals.growth > at.shrink_up:
            self._growing = True
        elif signals.growth < at.shrink_down:
            self._growing = False
        self._brimming = signals.line_full and signals.held >= (at.refuse_down if self._brimming else at.refuse_up)
        wanted = self._wanted()
        if wanted is not self.level:
            up = wanted > self.level
            dwell = at.dwell_up_s if up else at.dwell_down_s
            if not self._moved or now - self._since >= dwell:
                self._move(_ROWS[self.level.row + (1 if up else -1)], now)
        return self.level

    def limits(self, max_num_seqs: int, max_num_batched_tokens: int) -> Limits:
        """What a step may hold in a group that is built for these."""
        tokens = max_num_batched_tokens
        chunk = max(1, tokens // 2) if self.shrinks else tokens
        return Limits(max_num_seqs, tokens, chunk, refill=not self.shrinks, trim=self.level >= Level.TRIM)

    def lasted(self, now: float) -> float:
        """Seconds since the last move."""
        return max(0.0, now - self._since)

    def seconds(self, now: float) -> dict[str, float]:
        """How long each level has lasted in all, until now."""
        spent = self._seconds
        return {level.label: spent[level] + (self.lasted(now) if level is self.level else 0.0) for level in Level}

    def _wanted(self) -> Level:
        if self._brimming:
            return Level.REFUSE
        if self._growing:
            return Level.SHRINK
        return Level.TRIM if self._tight else Level.NORMAL

    def _move(self, level: Level, now: float) -> None:
        self._seconds[self.level] += self.lasted(now)
        self.level = level
        self._since = now
        self._moved = True
        self.changes += 1
