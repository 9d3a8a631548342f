"""API keys at the door: who is let in, to what, and what the others hear. Every route that serves a tenant is tried."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from cluster.keys import KeyFile
from cluster.protocol.caller import Callers
from cluster.tenants import KeyRing, Tenant, hash_of
from tests.scripted import Call, Scripted, app_of, says, send

OPEN = ("/health", "/version")

FILE: dict[str, Any] = {
    "tenants": [
        {"name": "one", "weight": 3, "max_waiting": 9, "keys": [hash_of("key-1"), hash_of("key-1b")]},
        {"name": "two", "keys": [{"hash": hash_of("key-2"), "expires": "1970-01-01T00:01:40Z"}]},
        {"name": "batch", "classes": ["batch"], "keys": [hash_of("key-batch")]},
        {"name": "live", "classes": ["interactive"], "keys": [hash_of("key-live")]},
        {"name": "elsewhere", "models": ["nothing here"], "keys": [hash_of("key-elsewhere")]},
        {"name": "alias", "models": ["alias/tiny"], "keys": [hash_of("key-alias")]},
    ]
}
RING = KeyRing.read(json.dumps(FILE), Tenant())
TURN = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"}),
    "stream": ("POST", "/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}),
    "chat": ("POST", "/v1/chat/completions", {"model": "tiny", "messages": TURN}),
    "prewarm": ("POST", "/v1/sessions/s/prewarm", {"model": "tiny", "messages": TURN}),
    "session": ("GET", "/v1/sessions/s", None),
    "forget": ("DELETE", "/v1/sessions/s", None),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/tiny", None),
}
EVERY = pytest.mark.parametrize("route", ROUTES)
WORK = pytest.mark.parametrize("route", ["completion", "stream", "chat", "prewarm"])


class Door:
    """An app with keys and a clock that stands still. `completer` sees what was let in."""

    def __init__(self, ring: KeyRing | None = RING) -> None:
        self.now = 0.0
        self.completer = Scripted(says("ok"))
        self.app = app_of(self.completer, callers=Callers(lambda: ring, lambda: self.now))

    def ask(self, route: str, key: str | None, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        method, path, content = ROUTES[route]
        sent = dict(headers or {}) | ({} if key is None else {"authorization": f"Bearer {key}"})
        return send(self.app, method, path, headers=sent, **({"json": content | fields} if content else {}))


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@EVERY
def test_a_key_lets_its_tenant_in(route: str) -> None:
    door = Door()
    assert door.ask(route, "key-1").status_code == 200
    assert {generation.tenant for generation in door.completer.seen} <= {"one"}


@EVERY
def test_each_of_a_tenants_keys_does(route: str) -> None:
    assert [Door().ask(route, key).status_code for key in ("key-1", "key-1b", "key-2")] == [200] * 3


@EVERY
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic a2V5LTE=", "key-1", "Bearerkey-1", "Token key-1"],
)
def test_without_a_key_the_answer_says_how_to_send_one(route: str, header: str | None) -> None:
    door = Door()
    answer = door.ask(route, None, {} if header is None else {"authorization": header})
    assert error(answer) == (401, "invalid_api_key")
    assert "Authorization: Bearer" in answer.json()["error"]["message"]
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not door.completer.seen


@EVERY
@pytest.mark.parametrize("key", ["key-3", "key-1 x", hash_of("key-1"), "KEY-1", "x" * 600, "ké"])
def test_a_key_that_is_nobodys_is_refused_and_not_repeated(
    route: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    door = Door()
    answer = door.ask(route, None, {"authorization": f"Bearer {key}".encode()})  # type: ignore[dict-item]
    assert error(answer) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert key not in answer.text
    assert not any(key in record.getMessage() for record in caplog.records if not record.name.startswith("httpx"))
    assert not door.completer.seen


@pytest.mark.parametrize("written", ["bearer key-1", "BEARER key-1", "Bearer  key-1", "Bearer key-1 "])
def test_the_scheme_may_be_written_in_any_way(written: str) -> None:
    assert Door().ask("models", None, {"authorization": written}).status_code == 200


@EVERY
def test_an_expired_key_is_refused_from_its_second_on(route: str) -> None:
    door = Door()
    door.now = 99.9
    assert door.ask(route, "key-2").status_code == 200
    door.now = 100.0
    assert error(door.ask(route, "key-2")) == (401, "invalid_api_key")
    assert door.ask(route, "key-1").status_code == 200


def test_without_keys_everybody_is_the_one_tenant() -> None:
    door = Door(None)
    assert door.ask("completion", None).status_code == 200
    assert door.ask("completion", "whatever").status_code == 200
    assert {generation.tenant for generation in door.completer.seen} == {"default"}


@pytest.mark.parametrize("path", [*OPEN, "/openapi.json"])
def test_monitors_need_no_key(path: str) -> None:
    assert send(Door().app, "GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/sessions/s/prewarm"])
def test_without_a_key_nothing_of_the_body_is_read(path: str) -> None:
    async def main() -> tuple[int, int]:
        call = Call(Door().app, path, [b"x" * 100] * 20)
        return await call.status(), call.read

    assert asyncio.run(main()) == (401, 0)


def test_the_tenants_share_travels_with_the_generation() -> None:
    door = Door()
    door.ask("completion", "key-1")
    share = door.completer.seen[0].share
    assert (share.tenant, share.weight, share.max_waiting) == ("one", 3, 9)


@WORK
def test_a_model_that_is_not_for_the_tenant_is_a_403_that_names_its_own(route: str) -> None:
    door = Door()
    answer = door.ask(route, "key-elsewhere")
    assert error(answer) == (403, "model_not_allowed")
    assert not door.completer.seen
    assert error(door.ask(route, "key-elsewhere", model="no such")) == (404, "model_not_found")


def test_the_models_shown_are_those_that_the_tenant_may_use() -> None:
    door = Door()
    shown = {
        key: [model["id"] for model in door.ask("models", key).json()["data"]]
        for key in ("key-1", "key-alias", "key-elsewhere")
    }
    assert shown == {"key-1": ["tiny", "alias/tiny"], "key-alias": ["tiny", "alias/tiny"], "key-elsewhere": []}
    assert error(door.ask("model", "key-elsewhere")) == (403, "model_not_allowed")
    assert "tiny" not in door.ask("completion", "key-elsewhere", model="no such").json()["error"]["message"]


@WORK
def test_a_class_that_is_not_for_the_tenant_is_a_403(route: str) -> None:
    door = Door()
    for fields, headers in (({"service_tier": "flex"}, {}), ({}, {"x-priority-class": "batch"})):
        assert error(door.ask(route, "key-live", headers, **fields)) == (403, "class_not_allowed")
    for fields, headers in (({"service_tier": "default"}, {}), ({}, {"x-priority-class": "interactive"})):
        assert error(door.ask(route, "key-batch", headers, **fields)) == (403, "class_not_allowed")
    assert not door.completer.seen
    assert door.ask(route, "key-batch").status_code == 200, "asked for nothing, it gets what it may"
    assert door.ask(route, "key-batch", service_tier="auto").status_code == 200
    assert {generation.priority.name for generation in door.completer.seen} == {"BATCH"}


def test_a_revoked_key_is_refused_as_soon_as_the_file_was_looked_at_and_its_stream_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(FILE))
    file = KeyFile(path, Tenant())
    go = asyncio.Event()

    def script(generation: Any) -> Any:
        told = list(says("the quick fox")(generation))
        yield told[0]
        yield go.wait
        yield from told[1:]

    app = app_of(script, callers=Callers(lambda: file.ring, lambda: 0.0))
    body = json.dumps(ROUTES["stream"][2]).encode()
    bearer = {"authorization": "Bearer key-1"}

    async def main() -> None:
        running = Call(app, "/v1/completions", body, bearer)
        assert await running.status() == 200
        path.write_text(json.dumps({"tenants": FILE["tenants"][1:]}))
        file.refresh()
        assert await Call(app, "/v1/completions", body, bearer).status() == 401
        go.set()
        await running.task
        text = b"".join([await running.write() for _ in range(running.writes.qsize())])
        assert text.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in text

    asyncio.run(main())


def using(app: FastAPI, key: str) -> Any:
    async def main() -> Any:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tidegate")
        async with openai.AsyncOpenAI(
            api_key=key, base_url="http://tidegate/v1", http_client=http, max_retries=0
        ) as client:
            return await client.completions.create(model="tiny", prompt="hi")

    return asyncio.run(main())


def test_the_official_client_sends_its_key_and_raises_its_own_errors() -> None:
    assert using(Door().app, "key-1").choices[0].text == "ok"
    with pytest.raises(openai.AuthenticationError):
        using(Door().app, "wrong")
    with pytest.raises(openai.PermissionDeniedError):
        using(Door().app, "key-elsewhere")


@pytest.mark.parametrize("keyed", [False, True])
def test_the_openapi_page_asks_for_a_key_where_one_is_needed(keyed: bool) -> None:
    page = send(Door(RING if keyed else None).app, "GET", "/openapi.json").json()
    for path, operations in page["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (keyed and path not in OPEN), path
    assert ("securitySchemes" in page["components"]) == keyed


def test_quotas_and_the_longest_keeping_are_the_tenants_own() -> None:
    fields = {"session_blocks": 5, "tenant_blocks": 50, "max_keep_alive_s": 20.0}
    ring = KeyRing.read(json.dumps({"tenants": [{"name": "t", "keys": [hash_of("k")]} | fields]}), Tenant())
    door = Door(ring)
    for keep in (None, 10, 1000.0):
        door.ask("completion", "k", keep_alive=keep)
    assert [generation.keep_s for generation in door.completer.seen] == [0.0, 10, 20.0]
    assert {(one.quota.session_blocks, one.quota.tenant_blocks) for one in door.completer.seen} == {(5, 50)}
