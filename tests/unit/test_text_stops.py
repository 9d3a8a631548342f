"""Stop strings: found however the text is cut, and nothing held back without a real partial match."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.stops import StopMatcher
from cluster.text.tokenizer import Transcript
from tests.scripted import TINY, byte_level, ids


def ended(text: str, stops: list[str]) -> str | None:
    """What precedes the stop string that is complete first, the longest of those that end there; None without one."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))]
    return None


def held(text: str, stops: list[str]) -> int:
    """The length of the longest end of the text that begins a stop string."""
    starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(1, len(text) + 1) if text[-length:] in starts), default=0)


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_every_cut_ends_where_the_whole_text_does_and_holds_only_partial_matches(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, shown, fed = StopMatcher(tuple(stops)), "", ""
    for piece in pieces:
        fed += piece
        shown += matcher.feed(piece)
        end = ended(fed, stops)
        assert matcher.hit == (end is not None)
        assert shown == (fed[: len(fed) - held(fed, stops)] if end is None else end)
    assert shown + matcher.flush() == (fed if ended(fed, stops) is None else ended(fed, stops))


def test_an_end_that_could_still_overlap_is_found() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.feed("xaa") + matcher.feed("ab") == "xa"
    assert matcher.hit


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopMatcher(("",))


TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("border", range(1, len(ids(TEXT))))
def test_a_stop_string_over_a_token_border_cuts_the_text_before_it(border: int) -> None:
    tokens = ids(TEXT)
    left, right = (TINY._tokenizer.decode(part) for part in (tokens[:border], tokens[border:]))
    stop = left[-2:] + right[:2]
    transcript = TINY.transcript((stop,))
    shown = "".join(transcript.feed([token]) for token in tokens)
    assert shown == TEXT[: TEXT.find(stop)]
    assert transcript.stopped


def test_tokens_behind_the_stop_string_are_neither_shown_nor_counted() -> None:
    tokens = ids(TEXT)
    one_by_one, at_once = TINY.transcript(("fox",)), TINY.transcript(("fox",))
    for token in tokens:
        if not one_by_one.stopped:
            one_by_one.feed([token])
    assert at_once.feed(tokens) == "the quick brown "
    assert at_once.tokens == one_by_one.tokens < len(tokens)


def test_a_stop_string_that_nothing_begins_delays_no_token() -> None:
    plain, stopped = TINY.transcript(), TINY.transcript(("Q" * 200,))
    for token in ids(TEXT):
        assert plain.feed([token]) == stopped.feed([token])


def test_a_multi_byte_stop_string_is_found_over_byte_tokens() -> None:
    tokenizer = byte_level(259)
    transcript = Transcript(tokenizer, TINY.vocabulary, ("🙃",))
    shown = "".join(transcript.feed([token]) for token in tokenizer.encode("🙂🙃x").ids)
    assert shown == "🙂"
    assert transcript.tokens == 8


def test_what_was_held_back_is_shown_when_the_text_ends() -> None:
    transcript = TINY.transcript(("fox jumps high",))
    shown = "".join(transcript.feed([token]) for token in ids("the fox jumps"))
    assert shown == "the "
    assert shown + transcript.finish() == "the fox jumps"
