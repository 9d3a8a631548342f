"""Long texts in parts: nothing lost, everything fits, borders where people would put them; and parts to one answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.jobs.splitting import Span, TooSmall, split
from deploy.jobs.tree import Node, groups, joined
from tests.scripted import ids

Count = Callable[[str], int]


def words(text: str) -> int:
    return len(text.split())


def tokens(text: str) -> int:
    return len(ids(text)) if text else 0


def parts(text: str, limit: int, count: Count = words) -> list[Span]:
    splitting = split(text, limit)
    try:
        asked = next(splitting)
        while True:
            asked = splitting.send([count(one) for one in asked])
    except StopIteration as done:
        return done.value


def texts(text: str, limit: int, count: Count = words) -> list[str]:
    return [span.of(text) for span in parts(text, limit, count)]


TEXTS = st.lists(
    st.sampled_from(["fox", "dog", " ", ". ", "! ", "\n", "\n\n", "\n \n", "日本。", "🙂", "x" * 40, '?" ', "Dr. "]),
    max_size=60,
).map("".join)


@given(TEXTS, st.integers(4, 40), st.sampled_from([words, tokens, len]))
@settings(max_examples=300, deadline=None)
def test_parts_are_the_text_and_fit(text: str, limit: int, count: Count) -> None:
    spans = parts(text, limit, count)
    assert "".join(span.of(text) for span in spans) == text
    assert all(span.end > span.start and span.tokens == count(span.of(text)) <= limit for span in spans)
    if count is not tokens:  # two neighbours that would fit into one part are not two
        together = [count(a.of(text) + b.of(text)) for a, b in pairwise(spans)]
        assert len(spans) <= 1 or max(together) > limit or not text.strip()


def test_a_text_that_fits_is_one_part_and_an_empty_one_none() -> None:
    assert texts("a b. c d\n\ne", 5) == ["a b. c d\n\ne"]
    assert texts("", 5) == []


def test_paragraphs_are_the_first_borders() -> None:
    text = "One two. Three four.\n\nFive six. Seven.\n\nEight nine ten."
    assert texts(text, 7) == ["One two. Three four.\n\nFive six. Seven.\n\n", "Eight nine ten."]
    assert texts(text, 6) == ["One two. Three four.\n\n", "Five six. Seven.\n\nEight nine ten."]


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    text = "One two three. Four five six! Seven eight? \u201cNine ten.\u201d Eleven."
    assert texts(text, 4) == ["One two three. ", "Four five six! ", "Seven eight? \u201cNine ten.\u201d ", "Eleven."]


def test_a_long_sentence_is_cut_between_words_and_a_long_word_anywhere() -> None:
    assert texts("one two three four five", 2) == ["one two ", "three four ", "five"]
    pieces = texts("x" * 100, 30, len)
    assert "".join(pieces) == "x" * 100 and max(map(len, pieces)) <= 30


def test_a_character_that_is_too_big_is_told() -> None:
    with pytest.raises(TooSmall, match="a single character has 9 tokens"):
        texts("xy", 8, lambda text: 9 * len(text))


def test_parts_that_are_longer_together_than_one_by_one_are_cut_again() -> None:
    def count(text: str) -> int:
        return words(text) + (words(text) > 3)

    assert max(map(count, texts("a. b. c. d. e. f. g.", 4, count))) <= 4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(100, 300))
def test_answers_are_grouped_in_order_until_one_is_left(counts: list[int], limit: int) -> None:
    rounds = 0
    while len(counts) > 1:
        runs = groups(counts, limit)
        assert [index for run in runs for index in run] == list(range(len(counts)))
        assert all(sum(counts[run.start : run.stop]) <= limit for run in runs)
        assert len(runs) < len(counts)
        counts, rounds = [50] * len(runs), rounds + 1
    assert rounds <= 7


def test_answers_of_which_no_two_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no two answers fit into the 10"):
        groups([6, 6, 6], 10)
    assert groups([60], 10) == [range(0, 1)]


def test_a_tree_shows_its_parts() -> None:
    leaves = (Node(0, 5, 9, "a"), Node(5, 9, 8, "b"))
    top = Node(0, 9, 7, "c", leaves)
    shown = top.as_json()
    assert shown["summary"] == "c" and [part["span"] for part in shown["parts"]] == [[0, 5], [5, 9]]
    assert len(shown["parts"]) == 2 and "parts" not in shown["parts"][0]
    assert re.fullmatch(r"Part 1: a\n\nPart 2: b", joined(["a ", "b"]))
