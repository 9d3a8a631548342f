"""Spelling: how single tokens are written, out of any text: as characters, and as bytes where those are known.

Knows no request; what a token adds to an answer is the detokenizer's matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import tokenizers

from cluster.text.vocabulary import Vocabulary

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback (SentencePiece) write a single byte."""


@dataclass(frozen=True, slots=True)
class Spelled:
    r"""`name` tells the token apart: its text, a control token's own spelling, \xNN for bytes that are no whole
    characters (`whole` is false then). `data`: its bytes in a text, None for a control token, or one that no text
    has."""

    name: str
    data: bytes | None
    whole: bool = True


class Spelling:
    """Of one tokenizer. What was spelled once is kept, for each of its tokens at most."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._known: dict[int, Spelled] = {}
        self._anchor = None if vocabulary.byte_level else self._find_anchor()

    def of(self, id: int) -> Spelled:
        """Any id, one that the tokenizer does not know too: models have rows to spare."""
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._spell(id)
        return known

    def _spell(self, id: int) -> Spelled:
        control = self._vocabulary.controls.get(id)
        if control is not None:
            return Spelled(control, None)
        piece = self._tokenizer.id_to_token(id)
        if piece is None:
            return Spelled(f"token_id:{id}", None)
        data = self._bytes(id, piece)
        try:
            return Spelled(data.decode(), data)
        except UnicodeDecodeError:
            return Spelled("".join(f"\\x{byte:02x}" for byte in data), data, whole=False)

    def _bytes(self, id: int, piece: str) -> bytes:
        if self._vocabulary.byte_level:
            return self._vocabulary.token_bytes(id)
        if single := _BYTE.fullmatch(piece):
            return bytes.fromhex(single[1])
        if self._anchor is None:
            return self._decode([id]).encode()
        # A decoder may treat the start of a text in its own way: behind another token there is none.
        return self._decode([self._anchor, id])[len(self._decode([self._anchor])) :].encode()

    def _find_anchor(self) -> int | None:
        """A token that is some letters, to stand before others."""
        for piece, id in sorted(self._tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda entry: entry[1]):
            if piece.isalpha() and piece.isascii() and self._decode([id]) == piece:
                return int(id)
        return None

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
