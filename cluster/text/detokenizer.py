"""Tokens to text while they arrive: no character is shown before it is whole. Knows no stop string and no stream.

The pieces joined are the tokenizer's decoding of all tokens with special ones skipped. A byte-level vocabulary is
decoded exactly, byte by byte; any other through the tokenizer itself, over a short window of the latest tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from cluster.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PATIENCE = 8
"""Tokens that can belong to one unfinished character; after more, the bytes are broken and are shown as such."""


class Detokenizer(Protocol):
    """One choice's text as its tokens come."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is whole now."""
        ...

    def flush(self) -> str:
        """The tokens have ended: what is left, an unfinished character as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: each token is some bytes, and the bytes are UTF-8, ill-formed ones U+FFFD."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is whole now."""
        return self._decoder.decode(b"".join(map(self._bytes, tokens)))

    def flush(self) -> str:
        """The unfinished character, if there is one, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary. The tokens last shown stay in the window, so that a decoder which treats the start
    of a text in its own way (Metaspace, WordPiece) does so once only."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown: list[int] = []
        self._new: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is whole now."""
        return "".join([self._step(token) for token in tokens if self._visible(token)])

    def flush(self) -> str:
        """What is left, as the tokenizer decodes it."""
        return self._show(self._decode(self._shown + self._new), len(self._decode(self._shown)))

    def _visible(self, token: int) -> bool:
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def _step(self, token: int) -> str:
        self._new.append(token)
        before, text = len(self._decode(self._shown)), self._decode(self._shown + self._new)
        if len(self._new) <= PATIENCE and (len(text) <= before or text.endswith(REPLACEMENT)):
            return ""
        return self._show(text, before)

    def _show(self, text: str, before: int) -> str:
        self._shown, self._new = self._new or self._shown, []
        return text[before:]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def detokenizer(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Detokenizer:
    """The one that fits this tokenizer's decoder."""
    if vocabulary.byte_level:
        return ByteDetokenizer(vocabulary)
    return WindowDetokenizer(tokenizer, vocabulary.special)
