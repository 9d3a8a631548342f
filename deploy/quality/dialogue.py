"""Script: a dialogue as the tokens that a served model sees, and where its turns lie. Texts that ship with Tidegate.

Knows no model beyond its tokenizer and chat template.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from cluster.errors import ApiError
from cluster.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "texts"
PROSE = ("prose.txt", "clock.txt")
DIALOGUE = "dialogue.txt"
_NO_LIMIT = 2**31
_SPEAKER = re.compile(r"^(user|assistant):\n", re.MULTILINE)

Message = Mapping[str, str]


class ScriptError(ValueError):
    """A dialogue that a model cannot be asked with; the message says why."""


def prose() -> str:
    """What precisions are measured on: a story and an account with figures, lists and code, some 4,200 tokens."""
    return "\n\n".join((TEXTS / name).read_text(encoding="utf-8").strip() for name in PROSE) + "\n"


def digest() -> str:
    """What identifies the texts, 16 hex digits."""
    parts = [(TEXTS / name).read_bytes() for name in (*PROSE, DIALOGUE)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def messages(text: str | None = None) -> list[Message]:
    """The messages of a dialogue in which a line "user:" or "assistant:" stands above what is said (the one that comes
    with Tidegate unless given). Raises ScriptError unless users and answers take turns."""
    given = (TEXTS / DIALOGUE).read_text(encoding="utf-8") if text is None else text
    parts = _SPEAKER.split(given.strip() + "\n")[1:]
    found: list[Message] = [
        {"role": role, "content": said.strip()} for role, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if len(found) < 2 or any(m["role"] != ("user", "assistant")[i % 2] for i, m in enumerate(found)) or len(found) % 2:
        raise ScriptError("a dialogue begins with user:, ends with assistant:, and the two take turns")
    return found


@dataclass(frozen=True, slots=True)
class Script:
    """`tokens` of the whole dialogue; turn i is tokens [first, last): from where the model begins its answer to where
    it begins the next, the following question included."""

    tokens: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]

    @classmethod
    def write(cls, tokenizer: Tokenizer, said: Sequence[Message], turns: int) -> Self:
        """The first `turns` of `said` by the model's chat template. Raises ScriptError for a model that has none, or
        whose template writes earlier turns anew, so that no cache could be kept; and for more turns than there are."""
        if turns > len(said) // 2:
            raise ScriptError(f"the dialogue has {len(said) // 2} turns, not {turns}")
        try:
            heads = [tokenizer.encode_chat(said[: 2 * turn + 1], _NO_LIMIT) for turn in range(turns)]
            whole = tokenizer.encode_chat(said[: 2 * turns], _NO_LIMIT)
        except ApiError as error:
            raise ScriptError(str(error)) from error
        if any(whole[: len(head)] != head for head in heads):
            raise ScriptError("the model's chat template changes earlier turns: no KV cache outlives a turn")
        edges = [*(len(head) for head in heads), len(whole)]
        return cls(whole, tuple(pairwise(edges)))
