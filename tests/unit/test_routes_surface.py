"""The rest of the surface: models, health, version, errors of the router, request ids, logs, the OpenAPI page."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from cluster.generation import Generation, GroupHealth, Health
from cluster.protocol.answers import ChatCompletion, ChatCompletionChunk, Completion
from tests.scripted import Scripted, app_of, chat, complete, events, ids, says, send, tiny
from workers.plan import TokenEvent

APP = app_of(says("fox"), version="1.2.3")


def test_the_models_are_those_that_requests_may_name() -> None:
    data = send(APP, "GET", "/v1/models").json()["data"]
    assert [(model["id"], model["object"], model["max_model_len"]) for model in data] == [
        ("tiny", "model", 512),
        ("alias/tiny", "model", 512),
    ]
    for model in data:
        assert send(APP, "GET", f"/v1/models/{model['id']}").json() == model
        assert complete(APP, model=model["id"]).json()["model"] == model["id"]
    answer = send(APP, "GET", "/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_the_version_is_told() -> None:
    assert send(APP, "GET", "/version").json() == {"version": "1.2.3"}


def test_health_is_ready_or_a_503_with_its_reason() -> None:
    completer = Scripted(says("fox"))
    app = app_of(completer)
    answer = send(app, "GET", "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    completer.state = Health(False, "group g0 has not advanced for 9 s", (GroupHealth("g0", False, "stuck"),))
    answer = send(app, "GET", "/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["reason"] == "group g0 has not advanced for 9 s"
    assert answer.json()["groups"] == [{"group": "g0", "ready": False, "reason": "stuck"}]
    assert "has not advanced" in answer.json()["error"]["message"]


def test_health_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Scripted):
        async def health(self) -> Health:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("cluster.protocol.routes.HEALTH_PATIENCE_S", 0.01)
    assert send(app_of(Hanging(says(""))), "GET", "/health").status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_what_there_is_not_is_an_error_in_the_same_shape(method: str, path: str, status: int, code: str) -> None:
    answer = send(APP, method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("given", ["abc-1.2:3_X", "x" * 128])
def test_a_harmless_request_id_is_echoed_on_answers_errors_and_streams(given: str) -> None:
    for body in ({}, {"stream": True}, {"max_tokens": 0}):
        content = {"model": "tiny", "prompt": "hi"} | body
        answer = send(APP, "POST", "/v1/completions", json=content, headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "é", "<script>"])
def test_any_other_request_id_is_replaced_by_a_new_one(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode()}
    made = {send(APP, "GET", "/version", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", id) for id in made)


def test_the_clients_text_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    def script(generation: Generation) -> Any:
        yield TokenEvent(generation.id, 0, 0, ids("fox"))
        raise RuntimeError(f"while working on {secret}")

    secret = "SECRETWORD"
    caplog.set_level(logging.DEBUG)
    app = app_of(script)
    for body in (
        {},
        {"stream": True},
        {"temperature": secret},
        {"model": secret},
        {"stop": [secret], "max_tokens": -1},
    ):
        complete(app, prompt=secret, **body)
        chat(app, messages=[{"role": "user", "content": secret}], **body)
    send(
        app,
        "POST",
        "/v1/completions",
        content=b'{"prompt": "' + secret.encode(),
        headers={"content-type": "application/json"},
    )
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "asyncio"))]
    assert len(ours) >= 4, "faults of ours are logged"
    assert not any(secret in record.getMessage() or record.exc_info for record in ours)
    assert any("RuntimeError" in record.getMessage() and "script" in record.getMessage() for record in ours)


def test_a_chat_without_a_template_is_a_400_and_a_refusing_one_is_quoted() -> None:
    answer = chat(app_of(says("fox"), tokenizer=tiny(None)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
    assert complete(app_of(says("fox"), tokenizer=tiny(None))).status_code == 200
    refusing = app_of(says("fox"), tokenizer=tiny("{{ raise_exception('roles must alternate') }}"))
    for stream in (False, True):
        answer = chat(refusing, stream=stream)
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]


def schemas(page: dict[str, Any]) -> set[str]:
    """Every reference of the page."""
    return set(re.findall(r"#/components/schemas/(\w+)", str(page)))


def test_the_openapi_page_is_whole_and_names_what_the_routes_take() -> None:
    page = send(APP, "GET", "/openapi.json").json()
    assert schemas(page) <= set(page["components"]["schemas"])
    assert set(page["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/sessions/{session}",
        "/v1/sessions/{session}/prewarm",
        "/tokenize",
        "/health",
        "/version",
    }
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        route = page["paths"][path]["post"]
        body = route["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        taken = page["components"]["schemas"][name]["properties"]
        assert {"model", "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"} <= set(taken)
        assert set(route["responses"]) == {"200", "4XX", "5XX"}, "and no 422 of FastAPI's"
        assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_answers_and_chunks_are_what_the_page_says() -> None:
    for ask, whole, chunk in ((complete, Completion, Completion), (chat, ChatCompletion, ChatCompletionChunk)):
        shape: Any = TypeAdapter(whole)
        shape.validate_json(ask(APP).content)
        for event in events(ask(APP, stream=True, stream_options={"include_usage": True}))[:-1]:
            made: Any = chunk.model_validate(event)
            assert set(event) <= set(chunk.model_fields)
            assert made.object == event["object"]
