"""Forecast: the most blocks that live sequences will hold at one time, if each generates what it is expected to.

Every sequence grows by one token per step until its expected length and then gives all back, so that what they hold
together only falls at the moments when one ends: the peak lies at one of those. Waiting sequences count as if they ran
from now on. Knows no limits and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import itemgetter

from kvstore.store import KVStore
from workers.sequence import Sequence

Course = tuple[int, int, int]
"""One sequence: tokens still to come, tokens now, blocks at its head that count as another's, which lives longer."""

GROWTH = 4
"""A sequence that outgrew its grant is expected to generate 1 / GROWTH of its output once more, at least a block."""


def peak_blocks(courses: Iterable[Course], block_size: int) -> int:
    """Blocks (of one layer group) at the highest moment. Exact, in O(n log n).

    After r = whole * block_size + part tokens a sequence has taken `whole` blocks more, and one besides if `part` is
    more than the free slots of its last block.
    """
    highest = now = 0
    slack: list[int] = []
    order = sorted(courses, key=itemgetter(0), reverse=True)
    for count, (rest, length, borrowed) in enumerate(order, start=1):
        blocks = -(-length // block_size)
        now += max(0, blocks - borrowed)
        insort(slack, blocks * block_size - length)
        whole, part = divmod(rest, block_size)
        highest = max(highest, now + whole * count + bisect_left(slack, part))
    return highest


def expected_length(length: int, outputs: int, granted: int, longest: int, block_size: int) -> int:
    """Tokens that a sequence of `length` tokens, `outputs` of them generated, will reach: what it was `granted` (0: all
    that it may), never beyond its `longest`; a bit more where it has outgrown that."""
    expected = granted or longest
    if length >= expected:
        expected = length + max(block_size, outputs // GROWTH)
    return max(length, min(expected, longest))


def committed_blocks(sequences: Iterable[Sequence], store: KVStore) -> int:
    """Blocks at the highest moment for `sequences`, what several hold counted once: with the one that lives longest."""
    size, extent = store.block_size, store.extent
    whole = extent.windows.count(None)
    ahead = []
    for sequence in sequences:
        request, length = sequence.request, sequence.length
        prompt = len(request.prompt)
        granted, longest = extent.tokens_for(request.granted_blocks), prompt + request.sampling.max_tokens
        rest = expected_length(length, length - prompt, granted, longest, size) - length
        ahead.append((rest, length, sequence.table))
    blocks = 0
    if whole < len(extent.windows):  # windows hold each sequence's share to a few blocks: no moment is looked for
        blocks = sum(
            extent.blocks_for(rest + length) - whole * -(-(rest + length) // size) for rest, length, _ in ahead
        )
    if whole:
        ahead.sort(key=itemgetter(0), reverse=True)
        borrowed = iter(store.borrowed([table for _, _, table in ahead if table]))
        courses = [(rest, length, next(borrowed) if table else 0) for rest, length, table in ahead]
        blocks += whole * peak_blocks(courses, size)
    return max(blocks, store.pool.held)
