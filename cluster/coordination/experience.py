"""What ended requests of one model teach: the share of max_tokens that outputs use, and how fast work drains.

Numbers only: knows no request, no group and no clock.
"""

from __future__ import annotations

import math


class Experience:
    """`weight` is a new outcome's share in the running mean; `window_s` how far back the drain rate looks; `floor_s`
    and `ceiling_s` bound what clients are told to wait, `default_s` is said before anything was measured."""

    def __init__(
        self,
        *,
        weight: float = 1 / 16,
        window_s: float = 10.0,
        floor_s: float = 1.0,
        ceiling_s: float = 60.0,
        default_s: float = 5.0,
    ) -> None:
        self._weight = weight
        self._window_s = window_s
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._default_s = default_s
        self._mean = 1.0
        self._spread = 0.0
        self._drained = 0.0
        self._drained_at: float | None = None

    @property
    def share(self) -> float:
        """The share of max_tokens to expect: the mean and one mean deviation on top, at most 1."""
        return min(1.0, self._mean + self._spread)

    def expect(self, max_tokens: int) -> int:
        """Output tokens to reserve for a request that may generate `max_tokens`: at least 1, at most `max_tokens`."""
        return max(1, min(max_tokens, math.ceil(max_tokens * self.share)))

    def learn(self, output_tokens: int, max_tokens: int) -> None:
        """A request that might have generated `max_tokens` ended by itself after `output_tokens`."""
        share = min(1.0, output_tokens / max_tokens)
        self._spread += self._weight * (abs(share - self._mean) - self._spread)
        self._mean += self._weight * (share - self._mean)

    def drain(self, tokens: int, now: float) -> None:
        """Room for `tokens` was given back at `now`."""
        self._drained = self._remaining(now) + tokens
        self._drained_at = now

    def rate(self, now: float) -> float:
        """Tokens of room given back per second, over about the last `window_s`."""
        return self._remaining(now) / self._window_s

    def wait_for(self, tokens: int, now: float) -> float:
        """Seconds until room for `tokens` has probably come back."""
        if self._drained_at is None:
            return self._default_s
        rate = self.rate(now)
        wait = tokens / rate if rate > 0 else self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, wait))

    def _remaining(self, now: float) -> float:
        if self._drained_at is None:
            return 0.0
        return self._drained * math.exp((self._drained_at - now) / self._window_s)
