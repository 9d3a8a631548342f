"""Extent: how many blocks a sequence of so many tokens holds, over all layer groups, and how many tokens blocks hold.
Arithmetic; knows neither pools nor tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import live_blocks

UNBOUNDED = 2**62
"""Tokens of a sequence that takes no more blocks however long it gets, because every layer has a window."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`block_size` tokens per block, the sliding `windows` of the layer groups (None: all of a sequence is kept).
    `ahead` tokens of a sequence may be on their way at once, beyond those that are in place."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    ahead: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.ahead) < 1 or not self.windows:
            raise ValueError(f"not an extent: {self}")

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has `tokens`."""
        blocks = -(-tokens // self.block_size)
        return sum(blocks if window is None else min(blocks, self.cap(window)) for window in self.windows)

    def tokens_for(self, blocks: int) -> int:
        """The most tokens, whole blocks of them, of a sequence that holds no more than `blocks`."""
        caps = sorted(self.cap(window) for window in self.windows if window is not None)
        growing, reached = len(self.windows), 0
        for cap in caps:
            if blocks < (cap - reached) * growing:
                break
            blocks -= (cap - reached) * growing
            growing, reached = growing - 1, cap
        return (reached + blocks // growing) * self.block_size if growing else UNBOUNDED

    def cached_tokens(self, blocks: int) -> int:
        """Tokens that so many cached blocks of one sequence are about: what a window lets go of stays cached for its
        time, so every group has as many."""
        return blocks // len(self.windows) * self.block_size

    def first_seen(self, window: int | None, computed: int) -> int:
        """Index of the first block that a token at position `computed` or later sees."""
        return 0 if window is None else max(0, computed - window + 1) // self.block_size

    def cap(self, window: int) -> int:
        """The most blocks that a group with `window` holds of one sequence."""
        return live_blocks(window, self.ahead, self.block_size)
