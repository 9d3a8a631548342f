"""Tree: how the answers about a document's parts become one answer about the document.

Pure. Leaves are parts of the text; a node above is an answer about the answers below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.jobs.splitting import packs


@dataclass(frozen=True, slots=True)
class Node:
    """The answer about the characters start to end of a document; made of the answers of `children` where there are
    any. The whole question had `tokens` tokens, as the server told it (None: it did not)."""

    start: int
    end: int
    tokens: int | None
    summary: str
    children: tuple[Node, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As it stands in a record."""
        shown: dict[str, Any] = {"span": [self.start, self.end], "tokens": self.tokens, "summary": self.summary}
        return shown | ({"parts": [child.as_json() for child in self.children]} if self.children else {})


def joined(answers: Sequence[str]) -> str:
    """The text that is asked about to make one answer of several."""
    return "\n\n".join(labelled(index, answer) for index, answer in enumerate(answers, 1))


def labelled(number: int, answer: str) -> str:
    """One of them, told apart from the others."""
    return f"Part {number}: {answer.strip()}"


def groups(counts: Sequence[int], limit: int) -> list[range]:
    """Which neighbours are asked about together: as many as have at most `limit` tokens together, `counts` each.

    There are fewer groups than there were answers, so that the tree ends; of one that is alone in its group nothing is
    asked. Raises ValueError where no two neighbours fit."""
    made = packs(counts, limit)
    if len(counts) > 1 and len(made) == len(counts):
        raise ValueError(f"no two answers fit into the {limit} tokens that one question may have")
    return made
