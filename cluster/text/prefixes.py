"""A set of token sequences, and how far another one runs along with any of them. Knows no text and no model."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

Tokens = tuple[int, ...]


class Prefixes:
    """Kept in order: whatever shares the longest prefix with a sequence stands next to where it would stand."""

    def __init__(self, sequences: Iterable[Tokens] = ()) -> None:
        self._sorted = sorted(set(sequences))

    def longest(self, tokens: Tokens) -> int:
        """How many tokens at the head of `tokens` are a prefix of one of the sequences. Costs about one comparison of
        the common part for each doubling of the set."""
        place = bisect(self._sorted, tokens)
        return max((common_prefix(tokens, near) for near in self._sorted[max(0, place - 1) : place + 1]), default=0)


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    same, end = 0, min(len(one), len(other))
    while same < end:
        middle = (same + end + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same
