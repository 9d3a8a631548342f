"""Pace: how many requests are under way at once, learnt from how the server takes them.

Pure: additive increase, multiplicative decrease, and the pauses that a server asks for. It doubles until the server
first pushes back; then one more per round of answers, half as many after a refusal. A request that had to wait in the
server's line was one too many: others may want that place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 30.0


@dataclass(slots=True)
class Pace:
    """At most `most` at once. Times are seconds of one clock; `seed` draws the jitter of backoffs."""

    most: int
    seed: int = 0
    limit: float = 1.0
    under_way: int = 0
    refusals: int = 0
    paused_until: float = 0.0
    _learning: bool = True
    _wanted: bool = False
    _lowered_at: float = float("-inf")
    _failures: int = 0
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def wait_s(self, now: float) -> float | None:
        """For whoever has a request. 0: it may go now; seconds until the pause is over; None: when one of those under
        way has ended."""
        if self.under_way >= int(self.limit):
            self._wanted = True
            return None
        return max(0.0, self.paused_until - now)

    def sent(self, now: float) -> None:
        """One goes."""
        self.under_way += 1
        self._wanted = False

    def answered(self, sent_at: float, now: float, *, waited: bool = False) -> None:
        """One that went at `sent_at` was answered; `waited`: it stood in the server's line for long."""
        self.under_way -= 1
        self._failures = 0
        if waited:
            self._learning = False
            self._lower(self.limit - 1, sent_at, now)
        elif self._wanted:  # else it is no limit, and nothing is learnt of it
            self.limit = min(float(self.most), self.limit + (1.0 if self._learning else 1.0 / self.limit))

    def refused(self, sent_at: float, now: float, retry_after: float | None) -> None:
        """The server had no room (429, 503) and said when to come back, or did not."""
        self.under_way -= 1
        self.refusals += 1
        self._learning = False
        self._lower(self.limit / 2, sent_at, now)
        self._pause(now, retry_after)

    def failed(self, sent_at: float, now: float) -> None:
        """The server could not be reached, or went away."""
        self.under_way -= 1
        self._learning = False
        self._lower(self.limit / 2, sent_at, now)
        self._pause(now, None)

    def dropped(self) -> None:
        """One was taken back, or the server found fault with what it asked: nothing learnt."""
        self.under_way -= 1

    def _lower(self, limit: float, sent_at: float, now: float) -> None:
        """Once for all that went before: one full server refuses many at the same time."""
        if sent_at >= self._lowered_at:
            self.limit, self._lowered_at = max(1.0, limit), now

    def _pause(self, now: float, retry_after: float | None) -> None:
        """So long as the server says; else twice as long as last time, more or less, so that not all come together."""
        if now < self.paused_until and retry_after is None:
            return
        backoff = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        pause = retry_after if retry_after is not None else backoff * self._draw.uniform(0.5, 1.0)
        self.paused_until = max(self.paused_until, now + pause)
