"""A client's own session over HTTP: look at it, forget it, fill it before it is needed; and never another tenant's."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from fastapi import FastAPI

from cluster.coordination.cards import SessionCopy
from cluster.errors import ApiError
from cluster.generation import Generation
from cluster.protocol.caller import Callers
from cluster.tenants import KeyRing, Tenant, hash_of
from tests.scripted import TINY, Call, Scripted, app_of, ids, says, send
from workers.plan import Finish, TokenEvent

TURN = [{"role": "user", "content": "hi"}]
COPIES = (SessionCopy("g0", 4, 128, 90.04), SessionCopy("g1", 2, 64, -0.5))
NAMES = ["s", "a/b", "a/prewarm", "prewarm", "über 日本 🙂", "a%2Fb", "...", "a:b\x7f", "x" * 256]
RING = KeyRing.read(
    json.dumps({"tenants": [{"name": name, "keys": [hash_of(f"key-{name}")]} for name in ("one", "two")]}), Tenant()
)


def prefilled(generation: Generation) -> Any:
    """What a group tells of a prompt that was only computed."""
    yield TokenEvent(generation.id, 0, 0, (), Finish.LENGTH, cached=min(2, len(generation.prompt)))


def at(session: str, more: str = "") -> str:
    return f"/v1/sessions/{quote(session, safe='')}{more}"


def prewarm(app: FastAPI, session: str = "s", **fields: Any) -> httpx.Response:
    return send(app, "POST", at(session, "/prewarm"), json={"model": "tiny"} | fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_shown_group_by_group(name: str) -> None:
    completer = Scripted(says("ok"))
    completer.copies["default", name] = COPIES
    answer = send(app_of(completer), "GET", at(name))
    assert answer.status_code == 200
    assert answer.json() == {
        "id": name,
        "object": "session",
        "blocks": 6,
        "copies": [
            {"group": "g0", "blocks": 4, "tokens": 128, "expires_s": 90.0},
            {"group": "g1", "blocks": 2, "tokens": 64, "expires_s": 0.0},
        ],
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_forgotten_and_that_may_be_said_twice(name: str) -> None:
    completer = Scripted(says("ok"))
    completer.copies["default", name] = COPIES
    app = app_of(completer)
    answers = [send(app, "DELETE", at(name)).json() for _ in range(2)]
    forgotten = {"id": name, "object": "session.deleted", "deleted": True}
    assert answers == [forgotten | {"blocks": 6}, forgotten | {"blocks": 0}]
    assert send(app, "GET", at(name)).json()["copies"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_session_has_one_name_in_paths_headers_and_bodies(name: str) -> None:
    completer = Scripted(prefilled)
    app = app_of(completer)
    content = {"model": "tiny", "prompt": "hi"}
    assert prewarm(app, name, prompt="hi").status_code == 200
    send(app, "POST", "/v1/completions", json=content | {"prompt_cache_key": name})
    if name.isprintable():
        send(app, "POST", "/v1/completions", json=content, headers={"x-session-id": name.encode()})  # type: ignore[dict-item]
    assert {generation.session for generation in completer.seen} == {name}


def test_a_header_in_latin_1_is_a_name_too() -> None:
    completer = Scripted(says("ok"))
    headers: Any = {"x-session-id": "é".encode("latin-1")}
    send(app_of(completer), "POST", "/v1/completions", json={"model": "tiny", "prompt": "hi"}, headers=headers)
    assert completer.seen[0].session == "é"


@pytest.mark.parametrize(("method", "more"), [("GET", ""), ("DELETE", ""), ("POST", "/prewarm")])
@pytest.mark.parametrize("name", ["x" * 257, "日" * 2000])
def test_a_name_that_is_too_long_is_a_400(method: str, more: str, name: str) -> None:
    answer = send(app_of(says("ok")), method, at(name, more), json={"model": "tiny", "prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert f"has {len(name)} characters; at most 256" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for method in ("GET", "DELETE") for path in ("/v1/sessions", "/v1/sessions/")]
    + [("POST", "/v1/sessions//prewarm")],
)
def test_a_session_without_a_name_is_not_found(method: str, path: str) -> None:
    completer = Scripted(prefilled)
    assert send(app_of(completer), method, path, json={"model": "tiny", "prompt": "hi"}).status_code == 404
    assert not completer.seen


@pytest.mark.parametrize("code", ["not_confirmed", "not_ready"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_what_nobody_can_say_or_confirm_is_a_503(method: str, code: str) -> None:
    completer = Scripted(says("ok"))
    completer.copies["default", "s"] = ApiError("g1 has not answered.", code, retry_after=2)
    answer = send(app_of(completer), method, at("s"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert answer.headers["retry-after"] == "2"


def test_another_tenants_session_of_the_same_name_is_another_session() -> None:
    completer = Scripted(prefilled)
    completer.copies["one", "s"] = COPIES
    app = app_of(completer, callers=Callers(lambda: RING, lambda: 0.0))
    keys = {name: {"authorization": f"Bearer key-{name}"} for name in ("one", "two")}
    assert [len(send(app, "GET", at("s"), headers=keys[name]).json()["copies"]) for name in keys] == [2, 0]
    assert send(app, "DELETE", at("s"), headers=keys["two"]).json()["blocks"] == 0
    assert ("one", "s") in completer.copies
    answer = send(app, "POST", at("s", "/prewarm"), json={"model": "tiny", "prompt": "hi"}, headers=keys["two"])
    assert answer.json()["session"]["copies"] == []
    assert completer.seen[0].tenant == "two"
    assert send(app, "DELETE", at("s"), headers=keys["one"]).json()["blocks"] == 6


def test_prewarming_computes_the_prompt_and_generates_nothing() -> None:
    completer = Scripted(prefilled)
    completer.copies["default", "s"] = COPIES
    app = app_of(completer)
    answer = prewarm(app, prompt="the quick fox", keep_alive=60).json()
    generation = completer.seen[0]
    assert (generation.sampling.max_tokens, generation.session, generation.keep_s) == (0, "s", 60)
    assert generation.prompt == ids("the quick fox")
    usage = {"prompt_tokens": len(generation.prompt), "completion_tokens": 0, "total_tokens": len(generation.prompt)}
    assert answer == {
        "id": "s",
        "object": "session.prewarmed",
        "model": "tiny",
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}},
        "session": send(app, "GET", at("s")).json(),
    }


def test_a_chat_is_prewarmed_as_it_will_be_asked() -> None:
    completer = Scripted(prefilled)
    turns = [{"role": "system", "content": "the lazy dog"}, *TURN]
    assert prewarm(app_of(completer), messages=turns).status_code == 200
    assert completer.seen[0].prompt == TINY.encode_chat(turns, 512)


def test_several_prompts_are_prewarmed_together() -> None:
    completer = Scripted(prefilled)
    usage = prewarm(app_of(completer), prompt=["the", "quick fox"]).json()["usage"]
    assert usage["prompt_tokens"] == len(ids("the")) + len(ids("quick fox"))
    assert [generation.sampling.max_tokens for generation in completer.seen] == [0, 0]


def test_a_prewarm_is_done_also_where_nobody_knows_the_session_yet() -> None:
    completer = Scripted(prefilled)
    completer.copies["default", "s"] = ApiError("Nobody answers.", "not_ready")
    answer = prewarm(app_of(completer), prompt="hi")
    assert (answer.status_code, answer.json()["session"]) == (200, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"prompt": "hi", "messages": TURN}, "messages"),
        ({"prompt": None, "messages": None}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [5] * 512}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role"),
        ({"messages": TURN, "tools": [{}]}, "tools"),
        ({"prompt": "hi", "suffix": "x"}, "suffix"),
        ({"prompt": "hi", "keep_alive": -1}, "keep_alive"),
        ({"prompt": "hi", "model": None}, "model"),
    ],
)
def test_a_prewarm_that_is_none_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    completer = Scripted(prefilled)
    answer = prewarm(app_of(completer), **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not completer.seen


@pytest.mark.parametrize("failure", [ApiError("Full.", "cluster_full", retry_after=3), RuntimeError("SECRET")])
def test_a_prewarm_that_fails_keeps_its_status(failure: Exception) -> None:
    def script(generation: Generation) -> Any:
        yield failure

    answer = prewarm(app_of(script), prompt="hi")
    assert answer.status_code == (503 if isinstance(failure, ApiError) else 500)
    assert "SECRET" not in answer.text


def test_a_client_that_leaves_ends_its_prewarm() -> None:
    def script(generation: Generation) -> Any:
        yield asyncio.Event().wait

    async def main() -> None:
        completer = Scripted(script)
        call = Call(app_of(completer), at("s", "/prewarm"), b'{"model": "tiny", "prompt": "hi"}')
        while not completer.seen:
            await asyncio.sleep(0)
        call.leave()
        await call.task
        assert completer.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left behind"

    asyncio.run(main())


def test_the_official_client_reaches_sessions_through_its_raw_calls() -> None:
    completer = Scripted(prefilled)
    completer.copies["default", "s"] = COPIES

    async def main() -> Any:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app_of(completer)), base_url="http://tidegate")
        async with openai.AsyncOpenAI(api_key="none", base_url="http://tidegate/v1", http_client=http) as client:
            return await client.get("/sessions/s", cast_to=httpx.Response)

    assert asyncio.run(main()).json()["blocks"] == 6


def test_the_openapi_page_names_what_prewarming_takes_and_what_all_of_them_answer() -> None:
    page = send(app_of(says("ok")), "GET", "/openapi.json").json()
    prewarming = page["paths"]["/v1/sessions/{session}/prewarm"]["post"]
    body = prewarming["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/PrewarmRequest"}
    taken = page["components"]["schemas"]["PrewarmRequest"]["properties"]
    assert set(taken) == {"model", "messages", "prompt", "priority", "service_tier", "timeout", "keep_alive"}
    assert set(page["paths"]["/v1/sessions/{session}"]) == {"get", "delete"}
    for operation in (prewarming, *page["paths"]["/v1/sessions/{session}"].values()):
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        assert "session" in [parameter["name"] for parameter in operation["parameters"]]
