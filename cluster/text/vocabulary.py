"""What a tokenizer's vocabulary says about its tokens: which are special, what bytes they are, how long they can be.

Reads a loaded `tokenizers.Tokenizer`; encodes nothing and keeps no state of a request.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

COMPOSED = 4
"""Unicode composition (NFC, NFKC) makes at most four characters into one."""

KEEP_LENGTH = {"Prepend", "NFD", "NFKD", "ByteLevel"}
KEEP_TEXT = {"ByteLevel", "Metaspace", "Digits"}


class Vocabulary:
    """`size` is one above the highest id. `special` ids are control tokens: skipped in text. `special_texts` maps their
    text to their id, `controls` the other way. `longest` is the most characters of a text that one token can stand for,
    None where no bound is certain."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        entries = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.size = max(entries.values(), default=-1) + 1
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.special_texts = {token.content: id for id, token in added.items() if token.special}
        self.controls = {id: text for text, id in self.special_texts.items()}
        self.byte_level = _kind(tokenizer.decoder) == "ByteLevel"
        self.longest = _longest(tokenizer, entries, added)
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary adds to the text; none for a special or unknown one."""
        known = self._bytes.get(id)
        if known is None:
            token = None if id in self.special or id < 0 else self._tokenizer.id_to_token(id)
            known = self._bytes[id] = b"" if token is None else _unmapped(token)
        return known


def _byte_characters() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2, Radford et al. 2019) -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + index): byte for index, byte in enumerate(rest)}


BYTE_CHARACTERS = _byte_characters()


def _unmapped(token: str) -> bytes:
    """A byte-level token's bytes. One with a character that stands for no byte is an added token: itself in UTF-8."""
    try:
        return bytes([BYTE_CHARACTERS[character] for character in token])
    except KeyError:
        return token.encode()


def _state(part: Any) -> dict[str, Any]:
    """The JSON description of a tokenizer's normalizer, pre-tokenizer or decoder; {} without one."""
    return {} if part is None else json.loads(part.__getstate__())


def _kind(part: Any) -> str:
    return str(_state(part).get("type", ""))


def _longest(tokenizer: tokenizers.Tokenizer, entries: dict[str, int], added: dict[int, Any]) -> int | None:
    """See `Vocabulary.longest`. A text of n characters has at least n / longest tokens if no step of the encoding drops
    characters (a stripping normalizer, a pre-tokenizer that removes what it splits on, fused unknown characters)."""
    shrink = _shrink(_state(tokenizer.normalizer))
    if shrink is None or not _keeps(_state(tokenizer.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None
    model = tokenizer.model
    fuses = getattr(model, "fuse_unk", True) and getattr(model, "unk_token", None) is not None
    if not isinstance(model, tokenizers.models.BPE) or (fuses and not model.byte_fallback):
        return None
    if getattr(model, "unk_token", None) is None and not (_byte_complete(entries) or model.byte_fallback):
        return None  # characters outside the vocabulary vanish
    return max((len(entry) for entry in entries), default=1) * shrink


def _byte_complete(entries: dict[str, int]) -> bool:
    return all(character in entries for character in BYTE_CHARACTERS)


def _shrink(normalizer: dict[str, Any]) -> int | None:
    """By how much a normalizer can shorten a text, at most; None when nothing is known."""
    kind = normalizer.get("type")
    if kind is None or kind in KEEP_LENGTH:
        return 1
    if kind in ("NFC", "NFKC"):
        return COMPOSED
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return 1 if pattern is not None and len(content) >= len(pattern) else None
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrink(step)
            if factor is None:
                return None
            product *= factor
        return product
    return None


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every character."""
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_keeps(step) for step in pre_tokenizer["pretokenizers"])
    if kind == "Split":
        return bool(pre_tokenizer.get("behavior") != "Removed")
    return kind is None or kind in KEEP_TEXT
