"""How fast the work of one model drains, and what clients are told to wait. No clock, no randomness of its own."""

from __future__ import annotations

import math
import random


class Drain:
    """`window_s` is how far back the rate looks; `floor_s` and `ceiling_s` bound what clients are told, `default_s` is
    said before anything was measured; what is said varies by `jitter`, so that those refused do not all come back at
    once."""

    def __init__(
        self,
        chance: random.Random,
        *,
        window_s: float = 10.0,
        floor_s: float = 1.0,
        ceiling_s: float = 60.0,
        default_s: float = 5.0,
        jitter: float = 0.2,
    ) -> None:
        self._chance = chance
        self._window_s = window_s
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._default_s = default_s
        self._jitter = jitter
        self._drained = 0.0
        self._drained_at: float | None = None
        self._began_at = 0.0

    def add(self, tokens: int, now: float) -> None:
        """Room for `tokens`, prompt and expected output as a line counts them, was given back at `now`."""
        if self._drained_at is None:
            self._began_at = now
        self._drained = self._remaining(now) + tokens
        self._drained_at = now

    def rate(self, now: float) -> float:
        """Tokens of room given back per second, over about the last `window_s` (or since the first)."""
        if self._drained_at is None:
            return 0.0
        seen = self._window_s * (1 - math.exp((self._began_at - now) / self._window_s))
        return self._remaining(now) / max(seen, 1.0)

    def wait_for(self, tokens: float, now: float) -> float | None:
        """Seconds until room for `tokens` has probably come back; None when nobody knows."""
        rate = self.rate(now)
        return tokens / rate if rate > 0 else None

    def retry_after(self, tokens: float, now: float) -> float:
        """What a client is told to wait until room for `tokens` has come back."""
        wait = self._default_s if self._drained_at is None else self.wait_for(tokens, now) or self._ceiling_s
        spread = 1 + self._chance.uniform(-self._jitter, self._jitter)
        return min(self._ceiling_s, max(self._floor_s, wait) * spread)

    def _remaining(self, now: float) -> float:
        if self._drained_at is None:
            return 0.0
        return self._drained * math.exp((self._drained_at - now) / self._window_s)
