"""Bodies: whatever is not one JSON object in UTF-8 within the limit is a 4xx in OpenAI's shape, and says why."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from cluster.errors import ApiError
from cluster.protocol import body
from cluster.protocol.api import ChatRequest, CompletionRequest
from tests.scripted import Call, app_of, says, send

GOOD = b'{"model": "tiny", "prompt": "hi"}'
JSON = {"content-type": "application/json"}


def posted(content: bytes, headers: dict[str, str] | None = None, path: str = "/v1/completions") -> httpx.Response:
    return send(app_of(says("ok")), "POST", path, content=content, headers=JSON if headers is None else headers)


def check_refusal(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    for internal in ("Traceback", "Error", "pydantic", "Request", "instance of", "class "):
        assert internal not in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{:", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "hi",}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"1", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"model": "tiny", "model": "tiny", "prompt": "hi"}', "names a field twice"),
        (b'{"model": "tiny", "prompt": "hi", "metadata": {"a": 1, "a": 2}}', "names a field twice"),
        (b"\xef\xbb\xbf" + GOOD, "byte order mark"),
        (GOOD.decode().encode("utf-16"), "not valid UTF-8"),
        (b'{"model": "tiny", "prompt": "\xc4\xe3"}', "not valid UTF-8 at byte 29"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"model": "tiny", "prompt": "\xe6\x97"}', "not valid UTF-8"),
        (b'{"model": "tiny", "prompt": "a\x00b"}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": NaN}', "NaN"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": Infinity}', "Infinity"),
        (b'{"model": "tiny", "prompt": "hi", "foo": -Infinity}', "-Infinity"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}', "finite"),
        (b'{"model": "tiny", "prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 20_000, "nested too deeply"),
        (b"[" * 50_001, "more than 50000 lists"),
        (b'{"model": "tiny", "prompt": [' + b"[1]," * 2_000_000 + b"[1]]}", "more than 50000 lists"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "\\udfff"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "hi", "user": "\\ud800 x"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "hi", "stop": ["\\uD83D"]}', "surrogate"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_json_object_is_a_400_that_says_why(content: bytes, words: str, path: str) -> None:
    answer = posted(content, path=path)
    if path.endswith("chat/completions") and b"1e999" in content:
        content = content.replace(b'"prompt": "hi"', b'"messages": [{"role": "user", "content": "hi"}]')
        answer = posted(content, path=path)
    check_refusal(answer, 400, words)


@pytest.mark.parametrize("depth", [900, 5_000])
def test_deep_nesting_in_an_ignored_field_is_no_server_error(depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    began = time.monotonic()
    answer = posted(GOOD[:-1] + b', "metadata": ' + deep + b"}")
    assert answer.status_code in (200, 400)
    assert time.monotonic() - began < 5


def test_brackets_within_a_text_are_no_lists() -> None:
    text = b'{"model": "tiny", "prompt": "' + b'[{\\"' * 60_000 + b'"}'
    assert posted(text).json()["error"]["code"] == "context_length_exceeded"


def test_a_text_that_never_ends_is_looked_through_once() -> None:
    began = time.monotonic()
    check_refusal(posted(b'{"model": "' + b'[\\"' * 1_000_000), 400, "not valid JSON")
    assert time.monotonic() - began < 2


def test_escaped_characters_beyond_the_basic_plane_are_text() -> None:
    assert posted(b'{"model": "tiny", "prompt": "\\ud83d\\ude42 \\u0000"}').status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-16",
        "json",
        "multipart/x",
    ],
)
def test_a_content_type_that_is_not_json_is_a_415(kind: str | None) -> None:
    check_refusal(posted(GOOD, {} if kind is None else {"content-type": kind}), 415, "application/json")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_json_in_utf8_is_taken_however_it_is_written(kind: str) -> None:
    assert posted(GOOD, {"content-type": kind}).status_code == 200


def test_a_body_over_the_limit_is_refused_by_its_length_before_any_of_it_is_read() -> None:
    async def main() -> tuple[int, int]:
        app = app_of(says("ok"), body_limit=1000)
        call = Call(app, "/v1/completions", [b"x" * 100] * 20, {"content-length": "2000"})
        return await call.status(), call.read

    assert asyncio.run(main()) == (413, 0)


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_over_the_limit() -> None:
    async def main() -> tuple[int, int]:
        app = app_of(says("ok"), body_limit=1000)
        call = Call(app, "/v1/completions", [b"x" * 100] * 1000)
        return await call.status(), call.read

    assert asyncio.run(main()) == (413, 11)


def test_the_limit_itself_is_still_taken() -> None:
    app = app_of(says("ok"), body_limit=len(GOOD))
    assert send(app, "POST", "/v1/completions", content=GOOD, headers=JSON).status_code == 200
    check_refusal(send(app, "POST", "/v1/completions", content=GOOD + b" ", headers=JSON), 413, "larger than 33 bytes")


def test_the_first_wrong_field_is_named_by_its_path() -> None:
    content = {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text"}]}],
    }
    with pytest.raises(ApiError) as refused:
        body.check(ChatRequest, content)
    assert (refused.value.param, refused.value.message) == (
        "messages[1].content[0].text",
        "'messages[1].content[0].text' is required.",
    )


def test_a_million_wrong_entries_cost_no_more_than_the_first() -> None:
    many = body.parse(json.dumps({"model": "m", "messages": [3] * 1_000_000}).encode())
    began = time.monotonic()
    with pytest.raises(ApiError, match=r"messages\[0\]' must be an object"):
        body.check(ChatRequest, many)
    with pytest.raises(ApiError, match="must hold strings only"):
        body.check(CompletionRequest, {"model": "m", "prompt": ["a", 1] * 60})
    assert time.monotonic() - began < 0.5
