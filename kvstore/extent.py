"""Extent: how many blocks a sequence of so many tokens holds, over all layer groups, and how many tokens blocks hold.
Arithmetic; knows neither pools nor tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.layout import OPEN_WINDOW, live_blocks

UNBOUNDED = 2**62
"""Tokens of a sequence that takes no more blocks however long it gets, because every layer has a window."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`block_size` tokens per block, the sliding `windows` of the layer groups (None: all of a sequence is kept).
    `ahead` tokens of a sequence may be on their way at once, beyond those that are in place.

    A group with a window of one token holds what only a token's own block is read for. A sequence that generates has
    one such block, two at a border, while a long chunk passes through as many as it covers and gives all but the last
    back at once. Few sequences are in a chunk at a time, so `blocks_for` counts the former, `most_for` the latter."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    ahead: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.ahead) < 1 or not self.windows:
            raise ValueError(f"not an extent: {self}")

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has `tokens`, open ones apart that a chunk passes through."""
        return self._held(tokens, self.cap)

    def most_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has `tokens`, for a moment: what it must find to run alone."""
        return self._held(tokens, self.peak)

    def tokens_for(self, blocks: int) -> int:
        """The most tokens, whole blocks of them, of a sequence for which `blocks_for` is no more than `blocks`."""
        return self._tokens(blocks, sorted(self.cap(window) for window in self.windows if window is not None))

    def longest_for(self, blocks: int) -> int:
        """The same by `most_for`: the longest sequence that so many blocks can ever hold."""
        return self._tokens(blocks, sorted(self.peak(window) for window in self.windows if window is not None))

    def caches(self, group: int) -> bool:
        """Whether anybody who finds a sequence's blocks in the cache reads those of `group`."""
        return self.windows[group] != OPEN_WINDOW

    def _held(self, tokens: int, cap: Callable[[int], int]) -> int:
        blocks = -(-tokens // self.block_size)
        return sum(blocks if window is None else min(blocks, cap(window)) for window in self.windows)

    def _tokens(self, blocks: int, caps: list[int]) -> int:
        growing, reached = len(self.windows), 0
        for cap in caps:
            if blocks < (cap - reached) * growing:
                break
            blocks -= (cap - reached) * growing
            growing, reached = growing - 1, cap
        return (reached + blocks // growing) * self.block_size if growing else UNBOUNDED

    def cached_tokens(self, blocks: int) -> int:
        """Tokens that so many cached blocks of one sequence are about: what a window lets go of stays cached for its
        time, so every group has as many that caches at all."""
        return blocks // max(1, sum(map(self.caches, range(len(self.windows))))) * self.block_size

    def first_seen(self, window: int | None, computed: int) -> int:
        """Index of the first block that a token at position `computed` or later sees."""
        return 0 if window is None else max(0, computed - window + 1) // self.block_size

    def cap(self, window: int) -> int:
        """The most blocks that a group with `window` holds of one sequence, open ones apart that a chunk passes
        through."""
        return live_blocks(window, min(self.ahead, 2) if window == OPEN_WINDOW else self.ahead, self.block_size)

    def peak(self, window: int) -> int:
        """The most that it holds of one sequence for a moment."""
        return live_blocks(window, self.ahead, self.block_size)
