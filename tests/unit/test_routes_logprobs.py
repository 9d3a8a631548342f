"""Log-probabilities and echo over HTTP: one entry per token, texts that join to the text, streamed or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from cluster.generation import Generation
from cluster.protocol import intake
from cluster.protocol.logprobs import MIN_LOGPROB
from cluster.text.tokenizer import Tokenizer
from tests.scripted import CARD, END, TINY, Scripted, app_of, chat, complete, events, ids, says, tiny
from tests.unit.test_text_detokenizer import LLAMA
from workers.logprobs import TokenLogprobs, pack
from workers.plan import Finish, TokenEvent

TEXT = "the quick 日本語 fox 🙂🙃 naïve"
BOS = TINY.vocabulary.special_texts["<s>"]


def value(token: int, place: int) -> float:
    return -(token % 7 + place + 1) / 8


def known(token: int, top: int) -> TokenLogprobs:
    """What the scripted model says of a token: itself likeliest if it is even."""
    first = token if token % 2 == 0 else (token + 1) % 320
    rest = [(first + place * 3) % 320 for place in range(top)]
    tops = tuple((id, value(first, place)) for place, id in enumerate(rest))
    return TokenLogprobs(value(token, 0) if token % 2 == 0 else -9.5, tops)


def tells(tokens: tuple[int, ...], finish: Finish = Finish.LENGTH, by: int = 1) -> Any:
    """A script that says `tokens`, `by` in an event, with what was asked for."""

    def script(generation: Generation) -> Iterable[TokenEvent]:
        sampling, prompt = generation.sampling, generation.prompt
        scores = None
        if sampling.prompt_logprobs is not None:
            top = sampling.prompt_logprobs
            scores = pack([known(token, top) for token in prompt[1:]], top)
        if not sampling.max_tokens:
            yield TokenEvent(generation.id, 0, 0, (), Finish.LENGTH, prompt=scores)
            return
        for index in range(0, len(tokens), by):
            part, last = tokens[index : index + by], index + by >= len(tokens)
            told = None
            if sampling.logprobs is not None:
                told = pack([known(token, sampling.logprobs) for token in part], sampling.logprobs)
            end = finish if last else None
            yield TokenEvent(generation.id, 0, index, part, end, logprobs=told, prompt=None if index else scores)

    return script


def choice(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def whole_of(stream: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probabilities of a completion's stream, put together."""
    text, told = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in stream[:-1]:
        for each in chunk["choices"]:
            text += each["text"]
            for name, values in (each["logprobs"] or {}).items():
                told[name] += values
    return text, told


# -- completions -------------------------------------------------------------------------------------------------------


def test_each_token_is_told_with_its_text_its_place_and_the_likeliest() -> None:
    tokens = ids("the quick fox")
    made = choice(complete(app_of(tells(tokens)), logprobs=2))
    told = made["logprobs"]
    assert "".join(told["tokens"]) == made["text"] == "the quick fox"
    assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(tokens))]
    assert told["token_logprobs"] == [known(token, 2).logprob for token in tokens]
    for token, tops in zip(tokens, told["top_logprobs"], strict=True):
        likeliest = {TINY.spelling.of(id).name: number for id, number in known(token, 2).top}
        assert tops.items() >= {name.encode().decode(): v for name, v in likeliest.items() if "\\x" not in name}.items()
        assert len(tops) == (2 if token % 2 == 0 else 3), "the token itself is always among them"


def test_without_alternatives_the_token_itself_is_told() -> None:
    told = choice(complete(app_of(tells(ids("the fox"))), logprobs=0))["logprobs"]
    assert [list(tops.values()) for tops in told["top_logprobs"]] == [[v] for v in told["token_logprobs"]]


def test_parts_of_a_character_are_told_by_their_bytes_and_the_last_one_brings_the_character() -> None:
    tokens = TINY.encode("🙃é", 99)
    assert len(tokens) > 3, "a character in parts"
    made = choice(complete(app_of(tells(tokens)), logprobs=1))
    told = made["logprobs"]
    assert made["text"] == "".join(told["tokens"]) == "🙃é"
    assert told["tokens"][0] == "" and "🙃" in told["tokens"]
    assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(tokens))]
    names = [name for tops in told["top_logprobs"] for name in tops]
    assert any(name.startswith("bytes:\\x") for name in names)


def test_a_token_that_ends_the_text_has_its_entry_and_no_text() -> None:
    tokens = (*ids("the fox"), END)
    answer = complete(app_of(tells(tokens, Finish.STOP)), logprobs=1)
    told = choice(answer)["logprobs"]
    assert len(told["tokens"]) == answer.json()["usage"]["completion_tokens"] == len(tokens)
    assert told["tokens"][-1] == "" and told["text_offset"][-1] == len("the fox")
    assert "<|im_end|>" in told["top_logprobs"][-1] or END % 2 == 0


def test_what_is_less_likely_than_anything_is_written_as_a_number() -> None:
    def script(generation: Generation) -> Iterable[TokenEvent]:
        told = pack([TokenLogprobs(float("-inf"), ((5, -0.5),))], 1)
        yield TokenEvent(generation.id, 0, 0, (7,), Finish.LENGTH, logprobs=told)

    assert choice(complete(app_of(script), logprobs=1))["logprobs"]["token_logprobs"] == [MIN_LOGPROB]


@given(
    text=st.text("the quick日🙂é\n<", min_size=1, max_size=20),
    stop=st.sampled_from([None, "ck", "qu", "日", "k日", "🙂"]),
    by=st.integers(1, 4),
    ends=st.booleans(),
    echo=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_entries_match_text_and_usage_and_a_stream_tells_the_same(
    text: str, stop: str | None, by: int, ends: bool, echo: bool
) -> None:
    tokens = ids(text) + ((END,) if ends else ())
    app = app_of(tells(tokens, Finish.STOP if ends else Finish.LENGTH, by))
    prompt = "<|im_start|>hi\n日🙂"
    body = {"logprobs": 1, "stop": stop, "echo": echo, "prompt": prompt}
    answer = complete(app, **body)
    made, told = choice(answer), choice(answer)["logprobs"]
    assert "".join(told["tokens"]) == made["text"]
    assert made["text"] == (prompt if echo else "") + (text if stop is None else text.split(stop)[0])
    usage = answer.json()["usage"]
    assert len(told["tokens"]) == usage["completion_tokens"] + (usage["prompt_tokens"] if echo else 0)
    offsets = [len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))]
    assert told["text_offset"] == offsets
    assert [found is None for found in told["token_logprobs"]] == [echo and not i for i in range(len(offsets))]
    assert whole_of(events(complete(app, **body, stream=True))) == (made["text"], told)


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat_tells_bytes_that_join_to_the_text() -> None:
    tokens = (*ids(TEXT), END)
    made = choice(chat(app_of(tells(tokens, Finish.STOP)), logprobs=True, top_logprobs=3))
    content = made["logprobs"]["content"]
    assert made["logprobs"]["refusal"] is None and len(content) == len(tokens)
    assert b"".join(bytes(entry["bytes"] or []) for entry in content).decode() == made["message"]["content"] == TEXT
    assert content[-1]["token"] == "<|im_end|>" and content[-1]["bytes"] is None
    for token, entry in zip(tokens, content, strict=True):
        assert entry["logprob"] == known(token, 3).logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [number for _, number in known(token, 3).top]
    assert any("\\x" in entry["token"] and len(entry["bytes"]) for entry in content), "a part of a character"


@pytest.mark.parametrize("top", [None, 0])
def test_a_chat_may_ask_for_its_tokens_alone(top: int | None) -> None:
    made = choice(chat(app_of(tells(ids("the fox"))), logprobs=True, top_logprobs=top))
    assert [entry["top_logprobs"] for entry in made["logprobs"]["content"]] == [[]] * len(ids("the fox"))
    assert choice(chat(app_of(tells(ids("the fox"))), logprobs=False))["logprobs"] is None


def test_a_chats_stream_tells_the_same_as_one_piece() -> None:
    app = app_of(tells((*ids(TEXT), END), Finish.STOP, 2))
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": ["naï"]}
    made = choice(chat(app, **body))
    chunks = [each for event in events(chat(app, **body, stream=True))[:-1] for each in event["choices"]]
    told = [entry for each in chunks if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert told == made["logprobs"]["content"]
    assert "".join(each["delta"].get("content") or "" for each in chunks) == made["message"]["content"]


# -- echo --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_the_text_with_the_prompt_as_it_was_sent(stream: bool) -> None:
    inner = TINY._tokenizer
    for prompt in ("\n1. Anna has 12", "<|im_start|>user\n日本", ids("the quick 🙂"), (BOS, *ids("fox"), END)):
        text = prompt if isinstance(prompt, str) else inner.decode(list(prompt), skip_special_tokens=False)
        for most in (0, 3):
            output = ids("the fox")[:most]
            answer = complete(app_of(tells(output)), prompt=prompt, echo=True, max_tokens=most, stream=stream)
            got = whole_of(events(answer))[0] if stream else choice(answer)["text"]
            assert got == text + inner.decode(list(output))


def test_a_token_that_the_tokenizer_adds_has_an_entry_and_no_text() -> None:
    inner = tiny()._tokenizer
    inner.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    app = app_of(tells(ids("fox")), tokenizer=Tokenizer(inner, None, "<s>"))
    for prompt, first in (("the", ""), ("<s>the", "<s>")):
        made = choice(complete(app, prompt=prompt, echo=True, logprobs=1))
        assert made["text"] == prompt + "fox"
        assert made["logprobs"]["tokens"][0] == first and "".join(made["logprobs"]["tokens"]) == made["text"]
        assert made["logprobs"]["token_logprobs"][0] is None and made["logprobs"]["top_logprobs"][0] is None


def test_echo_of_a_vocabulary_that_is_no_byte_level_one() -> None:
    tokenizer = Tokenizer(LLAMA, None, None)
    pieces = ("▁the", "▁fox", "es", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>")
    the, fox, es, *moon = (tokenizer._tokenizer.token_to_id(piece) for piece in pieces)
    prompt, output = (the, fox), (es, fox, *moon)
    app = app_of(tells(output), replace(CARD, vocab_size=400), tokenizer)
    made = choice(complete(app, prompt=list(prompt), echo=True, logprobs=1))
    assert made["text"] == "".join(made["logprobs"]["tokens"]) == "the foxes fox🙂"
    assert [tokenizer.spelling.of(id).data for id in output] == [b"es", b" fox", b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert not tokenizer.spelling.of(moon[0]).whole


def test_several_prompts_are_told_each_by_itself() -> None:
    answer = complete(app_of(tells(ids("fox"))), prompt=["the quick", "日"], echo=True, logprobs=1, max_tokens=0)
    texts = [made["text"] for made in answer.json()["choices"]]
    assert texts == ["the quick", "日"]
    for made, prompt in zip(answer.json()["choices"], texts, strict=True):
        assert len(made["logprobs"]["tokens"]) == len(ids(prompt)) and made["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 0


# -- what is asked of the group, and what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "body", "wanted"),
    [
        (complete, {}, (None, None)),
        (complete, {"logprobs": False, "echo": True}, (None, None)),
        (complete, {"logprobs": 0}, (0, None)),
        (complete, {"logprobs": 5, "echo": False}, (5, None)),
        (complete, {"logprobs": 2, "echo": True}, (2, 2)),
        (chat, {"logprobs": False}, (None, None)),
        (chat, {"logprobs": True}, (0, None)),
        (chat, {"logprobs": True, "top_logprobs": 20}, (20, None)),
    ],
)
def test_a_group_is_asked_for_what_the_client_wants_and_no_more(ask: Any, body: Any, wanted: Any) -> None:
    completer = Scripted(tells(ids("fox")))
    assert ask(app_of(completer, max_logprobs=5), **body).status_code == 200
    sampling = completer.seen[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == wanted


@pytest.mark.parametrize(
    ("ask", "body", "param", "words"),
    [
        (complete, {"logprobs": -1}, "logprobs", "at least 0"),
        (complete, {"logprobs": 6}, "logprobs", "at most 5, the limit of this service"),
        (complete, {"logprobs": 21}, "logprobs", "at most 20"),
        (complete, {"logprobs": True}, "logprobs", "whole number"),
        (complete, {"logprobs": "1"}, "logprobs", "whole number"),
        (complete, {"echo": 1}, "echo", "true or false"),
        (complete, {"max_tokens": 0}, "max_tokens", "at least 1, or 'echo' true"),
        (complete, {"max_tokens": 0, "echo": False}, "max_tokens", "at least 1"),
        (complete, {"max_tokens": -1, "echo": True}, "max_tokens", "at least 0"),
        (complete, {"max_completion_tokens": 0, "echo": True}, "max_completion_tokens", "at least 1"),
        (chat, {"logprobs": 1}, "logprobs", "true or false"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at least 0"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        (chat, {"top_logprobs": 0, "logprobs": False}, "top_logprobs", "needs 'logprobs'"),
    ],
)
def test_a_bad_value_is_a_400_that_names_its_field(ask: Any, body: Any, param: str, words: str) -> None:
    for stream in (False, True):
        answer = ask(app_of(says("ok"), max_logprobs=5), **body, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert words in error["message"], error


def test_a_prompt_may_fill_the_context_when_nothing_is_generated() -> None:
    app = app_of(tells(()), replace(CARD, pool_tokens=None))
    assert complete(app, prompt=[5] * 512, echo=True, max_tokens=0).status_code == 200
    for body in ({"prompt": [5] * 513, "max_tokens": 0}, {"prompt": [5] * 512, "max_tokens": 1}):
        error = complete(app, **body, echo=True).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_more_values_than_one_answer_should_hold_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_SCORES", 600)
    app = app_of(tells(ids("fox")))
    assert complete(app, prompt=[[5] * 100, [6] * 100], echo=True, logprobs=2).status_code == 200
    error = complete(app, prompt=[[5] * 100, [6] * 101], echo=True, logprobs=2).json()["error"]
    assert error["param"] == "echo" and "603 log-probabilities of 201 prompt tokens" in error["message"]
    assert complete(app, prompt=[[5] * 300], echo=True).status_code == 200, "an echo alone holds none"
