"""Splitting: a text that is too long for a model's context, cut into parts that fit, at the best borders there are.

Pure: whoever drives `split` counts tokens for it, with a tokenizer of its own or with a server's.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』)\]]*\s*|\n+")
_WORD = re.compile(r"\s+")
_BORDERS = (_PARAGRAPH, _SENTENCE, _WORD)
"""From the best border to the worst; behind them comes any border between two characters."""

Counting = Generator[list[str], list[int], "list[Span]"]
"""Yields texts, is sent how many tokens each has, returns the parts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters start to end (exclusive) of a text, which are `tokens` tokens."""

    start: int
    end: int
    tokens: int

    def of(self, text: str) -> str:
        """The characters."""
        return text[self.start : self.end]


class TooSmall(ValueError):
    """A single character has more tokens than a part may have."""


def split(text: str, limit: int) -> Counting:
    """Cut `text` into parts of at most `limit` tokens that are the text when put together again.

    Borders are paragraphs'; sentences' where a paragraph is longer than `limit`, then words', then characters'. A text
    that fits is one part, an empty one is none. Raises TooSmall.
    """
    if not text:
        return []
    units = yield from _counted(text, [(0, len(text))])
    for level in range(len(_BORDERS) + 1):
        if all(unit.tokens <= limit for unit in units):
            break
        units = yield from _refined(text, units, limit, level)
    packed = packs([unit.tokens for unit in units], limit)
    while True:  # put together, units may have a token more than one by one
        sized = yield from _counted(text, [(units[run.start].start, units[run.stop - 1].end) for run in packed])
        over = [index for index, span in enumerate(sized) if span.tokens > limit and len(packed[index]) > 1]
        if not over:
            return sized
        packed = [half for index, run in enumerate(packed) for half in (_halves(run) if index in over else [run])]


def _refined(text: str, units: Sequence[Span], limit: int, level: int) -> Generator[list[str], list[int], list[Span]]:
    """The units that are too long cut at the borders of `level`; behind the last level, in halves until they fit."""
    while True:
        pieces: list[tuple[int, int]] = []
        for unit in units:
            if unit.tokens > limit:
                pieces += _pieces(text, unit, level)
        counted = iter((yield from _counted(text, pieces)))
        refined: list[Span] = []
        for unit in units:
            if unit.tokens <= limit:
                refined.append(unit)
                continue
            end = unit.start
            while end < unit.end:
                refined.append(next(counted))
                end = refined[-1].end
        units = refined
        if level < len(_BORDERS) or all(unit.tokens <= limit for unit in units):
            return units


def _pieces(text: str, unit: Span, level: int) -> list[tuple[int, int]]:
    if level >= len(_BORDERS):
        if unit.end - unit.start == 1:
            raise TooSmall(f"a single character has {unit.tokens} tokens: more than a part may have")
        middle = (unit.start + unit.end) // 2
        return [(unit.start, middle), (middle, unit.end)]
    ends = [match.end() for match in _BORDERS[level].finditer(text, unit.start, unit.end)]
    borders = [unit.start, *(end for end in ends if end < unit.end), unit.end]
    return list(pairwise(borders))


def _counted(text: str, borders: Sequence[tuple[int, int]]) -> Generator[list[str], list[int], list[Span]]:
    if not borders:
        return []
    counts = yield [text[start:end] for start, end in borders]
    return [Span(start, end, tokens) for (start, end), tokens in zip(borders, counts, strict=True)]


def packs(counts: Sequence[int], limit: int) -> list[range]:
    """Neighbours together as long as the sum of their `counts` is at most `limit`; one that is more stands alone."""
    runs: list[range] = []
    begin, tokens = 0, 0
    for index, count in enumerate(counts):
        if index > begin and tokens + count > limit:
            runs.append(range(begin, index))
            begin, tokens = index, 0
        tokens += count
    return [*runs, range(begin, len(counts))]


def _halves(run: range) -> list[range]:
    middle = (run.start + run.stop) // 2
    return [range(run.start, middle), range(middle, run.stop)]
