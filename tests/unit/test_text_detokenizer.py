"""Tokens to text while they arrive: the pieces joined are the whole decode, and no character is shown in parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cluster.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, detokenizer
from cluster.text.vocabulary import Vocabulary
from tests.scripted import byte_level

BYTES = byte_level()
BYTES.add_tokens([AddedToken("a b", special=False), AddedToken("日", special=False)])
VOCABULARY = Vocabulary(BYTES)


def llama_like() -> tokenizers.Tokenizer:
    """Sentencepiece's shape: words with a leading mark, a byte token for whatever else, a leading space dropped."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "es", ",", "é"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {word: id for id, word in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


LLAMA = llama_like()


def shown(subject: Detokenizer, tokens: list[int], cuts: list[int]) -> str:
    bounds = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return "".join(subject.feed(tokens[start:end]) for start, end in pairwise(bounds)) + subject.flush()


some_tokens = st.lists(st.integers(0, VOCABULARY.size + 20), max_size=60)
some_cuts = st.lists(st.integers(0, 10**6), max_size=8)


@given(some_tokens, some_cuts)
@settings(max_examples=300, deadline=None)
def test_random_byte_level_tokens_give_the_whole_decode_however_they_are_cut(
    tokens: list[int], cuts: list[int]
) -> None:
    assert shown(ByteDetokenizer(VOCABULARY), tokens, cuts) == BYTES.decode(tokens, skip_special_tokens=True)


@given(some_tokens)
@settings(max_examples=100, deadline=None)
def test_the_window_gives_the_same_on_byte_level_tokens_that_are_well_formed(tokens: list[int]) -> None:
    whole = BYTES.decode(tokens, skip_special_tokens=True)
    encoded = BYTES.encode(whole.replace("\ufffd", "?")).ids
    assert shown(WindowDetokenizer(BYTES, VOCABULARY.special), encoded, []) == BYTES.decode(encoded)


@given(st.text(alphabet="the foxs,é日🙂 \n", max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_tokens_come_one_by_one_as_the_whole_decode(text: str) -> None:
    tokens = LLAMA.encode(text).ids
    subject = WindowDetokenizer(LLAMA, frozenset({1, 2}))
    assert "".join(subject.feed([token]) for token in tokens) + subject.flush() == LLAMA.decode(tokens)


def test_a_leading_space_is_dropped_at_the_start_only() -> None:
    subject = detokenizer(LLAMA, Vocabulary(LLAMA))
    words = [LLAMA.get_vocab()[word] for word in ("▁the", "▁fox", "es", "</s>", "▁fox")]
    assert [subject.feed([word]) for word in words] == ["the", " fox", "es", "", " fox"]


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_character_split_over_tokens_is_shown_whole_or_not_at_all(character: str) -> None:
    subject = ByteDetokenizer(Vocabulary(byte_level(259)))  # no merges: a token is a byte
    tokens = byte_level(259).encode(f"a{character}b").ids
    pieces = [subject.feed([token]) for token in tokens]
    assert [piece for piece in pieces if piece] == ["a", character, "b"]
    assert len(tokens) == 2 + len(character.encode())


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_answer_cut_inside_a_character_ends_in_a_replacement_character(kept: int) -> None:
    tokenizer = byte_level(259)
    tokens = tokenizer.encode("🙂").ids[:kept]
    subject = ByteDetokenizer(Vocabulary(tokenizer))
    assert (subject.feed(tokens), subject.flush()) == ("", "\ufffd")
    assert tokenizer.decode(tokens) == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    broken = [LLAMA.get_vocab()["<0xF0>"]] * 40
    subject = WindowDetokenizer(LLAMA, frozenset())
    assert "".join(subject.feed([token]) for token in broken), "nothing was shown in 40 tokens"


def test_unknown_and_special_tokens_show_nothing() -> None:
    subject = ByteDetokenizer(VOCABULARY)
    assert subject.feed([0, 1, 2, VOCABULARY.size + 5, -1]) + subject.flush() == ""
