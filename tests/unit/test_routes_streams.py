"""Streams: framing, order, one finish per choice, one end mark, and the same text as the whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.generation import Generation
from cluster.protocol.answers import ChatChunks, Chunks
from tests.scripted import END, Call, Script, Scripted, app_of, byte_level, chat, complete, events, ids, joined, says
from workers.plan import Finish, TokenEvent

TEXT = "the quick brown fox jumps over the lazy dog 日本語 🙂"
ASKS = pytest.mark.parametrize("ask", [complete, chat], ids=["completion", "chat"])
ONE = b'{"model": "tiny", "prompt": "hi", "stream": true}'


def whole(answer: Any, index: int = 0) -> tuple[str, str]:
    choice = answer.json()["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


def finishes(stream: list[Any]) -> list[tuple[int, str]]:
    choices = [choice for event in stream if event != "[DONE]" for choice in event.get("choices", [])]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]


@ASKS
@pytest.mark.parametrize("by", [1, 3, 1000])
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_a_stream_joined_is_the_whole_answer(ask: Any, by: int, finish: Finish) -> None:
    app = app_of(says(TEXT, finish, by=by))
    stream = events(ask(app, stream=True))
    assert (joined(stream), finish.value) == whole(ask(app)) == (TEXT, finish.value)
    assert finishes(stream) == [(0, finish.value)]
    assert stream[-1] == "[DONE]" and stream.count("[DONE]") == 1


def test_the_role_comes_first_and_each_event_is_the_chunk_of_its_route() -> None:
    stream = events(chat(app_of(says("fox")), stream=True))
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"].get("role") for event in stream[1:-1]] == [None] * (len(stream) - 2)
    assert {event["object"] for event in stream[:-1]} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in stream[:-1]}) == 1
    assert {event["object"] for event in events(complete(app_of(says("fox")), stream=True))[:-1]} == {"text_completion"}


@ASKS
def test_usage_is_one_chunk_before_the_end_when_asked_for_and_nowhere_else(ask: Any) -> None:
    app = app_of(says(TEXT, cached=1))
    expected = ask(app).json()["usage"]
    assert expected["prompt_tokens_details"] == {"cached_tokens": 1}
    assert expected["completion_tokens"] == len(ids(TEXT)) + 1
    assert expected["total_tokens"] == expected["prompt_tokens"] + expected["completion_tokens"]
    on = events(ask(app, stream=True, stream_options={"include_usage": True}))
    assert on[-2]["choices"] == [] and on[-2]["usage"] == expected
    assert all(event["usage"] is None for event in on[:-2])
    for options in (None, {}, {"include_usage": False}):
        off = events(ask(app, stream=True, stream_options=options))
        assert not any("usage" in event for event in off[:-1])
        assert off[-2]["choices"]
    assert ask(app, stream_options={"include_usage": True}).json()["usage"] == expected


@ASKS
@pytest.mark.parametrize("by", [1, 4, 1000])
@pytest.mark.parametrize("stop", [" brown fox", "azy", "本", "🙂"])
def test_a_stop_string_ends_text_usage_and_generation(ask: Any, by: int, stop: str) -> None:
    completer = Scripted(says(TEXT, by=by))
    app = app_of(completer)
    answer, stream = ask(app, stop=stop), events(ask(app, stop=[stop, "no such"], stream=True))
    assert whole(answer) == (TEXT[: TEXT.find(stop)], "stop")
    assert joined(stream) == TEXT[: TEXT.find(stop)]
    assert finishes(stream) == [(0, "stop")]
    tokens = answer.json()["usage"]["completion_tokens"]
    decoded = [byte_level().decode(ids(TEXT)[:count]) for count in (tokens - 1, tokens)]
    assert stop not in decoded[0] and stop in decoded[1], "counted up to the token that completed it"
    if by == 1:
        assert len(completer.closed) == 2, "the model is told to stop"
        assert completer.satisfied == completer.closed, "because of the text, not because the client has left"


@ASKS
def test_an_answer_without_text_has_a_finish_all_the_same(ask: Any) -> None:
    app = app_of(says(""))
    stream = events(ask(app, stream=True, stream_options={"include_usage": True}))
    assert whole(ask(app)) == ("", "stop")
    assert (joined(stream), finishes(stream)) == ("", [(0, "stop")])
    assert stream[-2]["usage"]["completion_tokens"] == 1 == ask(app).json()["usage"]["completion_tokens"]


def test_a_stop_token_is_counted_and_not_shown_though_it_is_a_word() -> None:
    def script(generation: Generation) -> Any:
        tokens = ids("the fox")
        yield TokenEvent(generation.id, 0, 0, tokens, Finish.STOP)

    answer = complete(app_of(script), stop_token_ids=[ids("the fox")[-1]])
    assert whole(answer) == ("the", "stop")
    assert answer.json()["usage"]["completion_tokens"] == len(ids("the fox"))
    assert whole(complete(app_of(says("fox")), stop_token_ids=[END])) == ("fox", "stop")


@ASKS
@pytest.mark.parametrize("cut", range(1, 8))
def test_an_answer_cut_inside_a_character_is_the_same_in_both_modes(ask: Any, cut: int) -> None:
    tokens = [byte_level(259).encode("🙂🙃").ids[:cut]][0]

    def script(generation: Generation) -> Any:
        for index, token in enumerate(tokens):
            yield TokenEvent(generation.id, 0, index, (token,), Finish.LENGTH if index + 1 == cut else None)

    app = app_of(script)
    assert whole(ask(app)) == (byte_level(259).decode(tokens), "length")
    assert joined(events(ask(app, stream=True))) == byte_level(259).decode(tokens)


def test_many_prompts_give_as_many_choices_by_index_and_usage_sums_them() -> None:
    def script(generation: Generation) -> Any:
        return says(f"fox {len(generation.prompt)}", cached=1)(generation)

    app = app_of(script)
    prompts = [[5, 6, 7], [5], [5, 6]]
    answer = complete(app, prompt=prompts).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "fox 3"),
        (1, "fox 1"),
        (2, "fox 2"),
    ]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    stream = events(complete(app, prompt=prompts, stream=True, stream_options={"include_usage": True}))
    assert [joined(stream, index) for index in range(3)] == ["fox 3", "fox 1", "fox 2"]
    assert sorted(finishes(stream)) == [(0, "stop"), (1, "stop"), (2, "stop")]
    assert stream[-2]["usage"] == answer["usage"]
    assert stream.count("[DONE]") == 1


def test_separators_of_lines_are_escaped_and_the_charset_is_named() -> None:
    answer = complete(app_of(says("a\u2028b\u0085c 日")), stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content.isascii()
    naive = [line[6:] for line in answer.content.decode("latin-1").splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in naive) == "a\u2028b\u0085c 日"


def test_each_event_of_the_model_is_one_write_and_the_end_rides_on_the_last() -> None:
    async def main() -> list[bytes]:
        call = Call(app_of(says("the quick fox")), "/v1/completions", ONE)
        assert await call.status() == 200
        await call.task
        return [(await call.write()) for _ in range(call.writes.qsize())]

    writes = asyncio.run(main())
    assert len([write for write in writes if write]) == len(ids("the quick fox")) + 1
    assert writes[-2].endswith(b"data: [DONE]\n\n") and writes[-1] == b""


def fails_after(text: str, failure: Any) -> Script:
    def script(generation: Generation) -> Any:
        told = says(text, Finish.LENGTH)(generation)
        yield from (event for event in told if isinstance(event, TokenEvent) and event.finish is None)
        if isinstance(failure, Finish):
            yield TokenEvent(generation.id, 0, 0, (), failure, error="rank 1 died: SECRET")
        elif failure is not None:
            raise failure

    return script


FAILURES = [
    (ApiError("Full.", "cluster_full", retry_after=2.2), 503, "cluster_full"),
    (ApiError("Too many.", "tenant_limit"), 429, "tenant_limit"),
    (ApiError("Never.", "never_fits"), 400, "never_fits"),
    (ApiError("Late.", "timed_out"), 504, "timed_out"),
    (ApiError("Poison.", "poisoned_request"), 500, "poisoned_request"),
    (ApiError("Odd.", "not in the table"), 500, "not in the table"),
    (RuntimeError("SECRET"), 500, "internal_error"),
    (Finish.ABORT, 503, "aborted"),
    (Finish.ERROR, 500, "generation_failed"),
    (None, 500, "generation_failed"),
]


@ASKS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
def test_a_failure_before_the_first_token_keeps_its_status(
    ask: Any, stream: bool, failure: Any, status: int, code: str
) -> None:
    answer = ask(app_of(fails_after("", failure)), stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert "SECRET" not in answer.text
    assert answer.headers.get("retry-after") == {"cluster_full": "3", "aborted": "1"}.get(code)


@ASKS
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
def test_a_failure_in_mid_stream_is_an_error_event_then_the_end_and_no_finish(
    ask: Any, failure: Any, status: int, code: str
) -> None:
    answer = ask(app_of(fails_after("the quick fox", failure)), stream=True)
    stream = events(answer)
    assert answer.status_code == 200
    assert joined(stream[:-2]) == "the quick"
    assert stream[-2]["error"]["code"] == code
    assert stream[-1] == "[DONE]" and not finishes(stream[:-2])
    assert "SECRET" not in answer.text
    assert ask(app_of(fails_after("the quick fox", failure))).status_code == status


def test_one_choice_that_fails_ends_the_others() -> None:
    def script(generation: Generation) -> Any:
        if generation.id.endswith("-1"):
            raise ApiError("Full.", "cluster_full")
        yield TokenEvent(generation.id, 0, 0, ids("fox"))
        yield asyncio.Event().wait

    completer = Scripted(script)
    answer = complete(app_of(completer), prompt=["a", "b", "c"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cluster_full")
    assert sorted(name[-1] for name in completer.closed) == ["0", "1", "2"]


def test_a_gap_in_the_tokens_is_an_error_and_not_a_wrong_text() -> None:
    def script(generation: Generation) -> Any:
        yield TokenEvent(generation.id, 0, 0, ids("the"))
        yield TokenEvent(generation.id, 0, 5, ids(" fox"), Finish.LENGTH)

    assert complete(app_of(script)).json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("kind", [Chunks, ChatChunks])
@pytest.mark.parametrize("text", ['"', "\\", "\u2028</script>\x00\n", "日本🙂", "\ud800", "null}", ""])
def test_a_text_chunk_is_what_json_would_make_of_it(kind: type[Chunks], usage: bool, text: str) -> None:
    made = kind('id"', 7, "mo\\del 🙂", usage).text(3, text)
    choice = {"text": text} if kind is Chunks else {"delta": {"content": text}}
    whole = {"id": 'id"', "object": kind.kind, "created": 7, "model": "mo\\del 🙂"}
    whole |= {"choices": [{"index": 3, **choice, "logprobs": None, "finish_reason": None}]}
    whole |= {"usage": None} if usage else {}
    assert made == b"data: " + json.dumps(whole, separators=(",", ":")).encode("ascii") + b"\n\n"
