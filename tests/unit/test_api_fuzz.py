"""Whatever JSON a client puts into the fields: an answer or a 4xx in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.api import ChatRequest, CompletionRequest, PrewarmRequest, TokenizeRequest
from cluster.protocol.caller import Callers
from cluster.protocol.fields import CHAT, COMPLETION, MESSAGE
from cluster.tenants import KeyRing, Tenant, hash_of
from tests.scripted import END, app_of, chat, complete, ids, says, send
from tests.unit.test_routes_logprobs import tells
from workers.plan import Finish

APP = app_of(tells((*ids("the fox"), END), Finish.STOP, by=2))
RING = KeyRing.read(json.dumps({"tenants": [{"name": "t", "keys": [hash_of("key")]}]}), Tenant())
KEYED = app_of(says("the fox"), callers=Callers(lambda: RING, lambda: 0.0))
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["tiny", "user", "text", "<|im_end|>", "fox"]))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", *MESSAGE]), VALUES, max_size=4), max_size=3
)


def bodies(fields: set[str], valid: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields with any value at all, some with one that is likely to be taken."""
    wild = st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=3)
    return st.builds(lambda one, other: one | other, st.fixed_dictionaries({}, optional=valid), wild)


VALID: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "max_tokens": st.integers(1, 600),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text("the fox", min_size=1, max_size=3), max_size=3),
    "logprobs": st.one_of(st.integers(0, 5), st.booleans()),
    "top_logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "min_tokens": st.integers(0, 20),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.dictionaries(st.integers(0, 330).map(str), st.floats(-100, 100), max_size=3),
}
SCHEDULED: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(-100, 100),
    "service_tier": st.sampled_from(["auto", "default", "flex", "scale", "priority"]),
    "timeout": st.floats(0.001, 86_400),
    "keep_alive": st.floats(0, 86_400),
}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(st.text("0123456789.-+eE_naifbtchxrv ", max_size=9), st.text(max_size=9)).map(str.encode)
        for name in ("x-session-id", "x-request-timeout", "x-priority-class", "authorization", "x-request-id")
    },
)
PROMPTS = st.one_of(st.text(min_size=1, max_size=20), st.lists(st.integers(0, 319), min_size=1, max_size=9))


def check_answer(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
        assert not any(word in error["message"] for word in ("Traceback", "pydantic", "instance of"))


@given(bodies({*CompletionRequest.model_fields, *COMPLETION}, VALID | SCHEDULED | {"prompt": PROMPTS}))
@settings(max_examples=400, deadline=None)
def test_no_completion_request_is_a_server_error(body: dict[str, Any]) -> None:
    check_answer(complete(APP, **body))


@given(bodies({*ChatRequest.model_fields, *CHAT}, VALID | SCHEDULED | {"messages": MESSAGES}))
@settings(max_examples=400, deadline=None)
def test_no_chat_request_is_a_server_error(body: dict[str, Any]) -> None:
    check_answer(chat(APP, **body))


@given(
    bodies({*PrewarmRequest.model_fields, *CHAT}, SCHEDULED | {"prompt": PROMPTS, "messages": MESSAGES}),
    st.text(max_size=300),
)
@settings(max_examples=300, deadline=None)
def test_no_prewarming_of_any_session_is_a_server_error(body: dict[str, Any], session: str) -> None:
    path = f"/v1/sessions/{quote(session.encode('utf-8', 'replace'), safe='')}/prewarm"
    check_answer(send(APP, "POST", path, json={"model": "tiny"} | body))


@given(bodies({*TokenizeRequest.model_fields, *CHAT}, {"prompt": PROMPTS, "messages": MESSAGES}))
@settings(max_examples=300, deadline=None)
def test_no_counting_is_a_server_error(body: dict[str, Any]) -> None:
    check_answer(send(APP, "POST", "/tokenize", json={"model": "tiny"} | body))


@given(HEADERS)
@settings(max_examples=300, deadline=None)
def test_no_header_is_a_server_error(headers: dict[str, Any]) -> None:
    whole = {"model": "tiny", "prompt": "hi"}
    check_answer(send(APP, "POST", "/v1/completions", json=whole, headers=headers))
    check_answer(send(KEYED, "POST", "/v1/completions", json=whole, headers=headers))
