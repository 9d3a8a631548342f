"""Budget: how much a step may carry since a rank ran out of memory. It halves at once and comes back slowly.

Knows steps by their size only. What the group's limits allow is the caller's to say.
"""

from __future__ import annotations

GOOD_STEPS = 32
"""After so many steps without a shortage in a row the budget grows."""
RECOVERY = 8
"""It grows by 1 / RECOVERY of what the limits allow."""


class Budget:
    """Rows and tokens per step. Nothing is held back until a step was short."""

    def __init__(self) -> None:
        self._caps: tuple[int, int] | None = None
        self._good = 0

    @property
    def reduced(self) -> bool:
        """Whether it holds something back."""
        return self._caps is not None

    def allow(self, rows: int, tokens: int) -> tuple[int, int]:
        """What of `rows` and `tokens` a step may carry now."""
        return (rows, tokens) if self._caps is None else (min(rows, self._caps[0]), min(tokens, self._caps[1]))

    def short(self, rows: int, tokens: int) -> None:
        """A step of this size found no memory: half of it is the most from now on."""
        rows, tokens = self.allow(rows, tokens)
        self._caps = (max(1, rows // 2), max(1, tokens // 2))
        self._good = 0

    def good(self, rows: int, tokens: int) -> None:
        """A step ran, where the limits allow `rows` and `tokens`."""
        if self._caps is None:
            return
        self._good += 1
        if self._good < GOOD_STEPS:
            return
        self._good = 0
        most = (self._caps[0] + max(1, rows // RECOVERY), self._caps[1] + max(1, tokens // RECOVERY))
        self._caps = None if most[0] >= rows and most[1] >= tokens else most
