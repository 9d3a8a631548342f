"""POST /tokenize: what the model's own tokenizer and chat template make of prompts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.protocol.caller import Callers
from cluster.tenants import Tenant
from tests.scripted import CARD, TINY, Scripted, app_of, ids, says, send, tiny

COMPLETER = Scripted(says("never"))
APP = app_of(COMPLETER)
TURNS = [{"role": "user", "content": "the quick <|im_end|> fox"}]


def count(app: Any = APP, **body: Any) -> httpx.Response:
    return send(app, "POST", "/tokenize", json={"model": "tiny"} | body)


def test_a_prompts_tokens_are_those_that_a_completion_gets() -> None:
    answer = count(prompt="the quick fox").json()
    assert answer == {
        "count": len(ids("the quick fox")),
        "counts": [len(ids("the quick fox"))],
        "max_model_len": CARD.max_model_len,
        "tokens": list(ids("the quick fox")),
    }
    assert not COMPLETER.seen, "nothing is computed"


def test_a_chats_tokens_are_those_that_the_template_makes() -> None:
    assert count(messages=TURNS).json()["tokens"] == list(TINY.encode_chat(TURNS, 10**6))


def test_many_prompts_are_counted_each() -> None:
    texts = ["the", "the quick brown fox", "\n\n"]
    answer = count(prompt=texts).json()
    assert answer["counts"] == [len(ids(text)) for text in texts]
    assert answer["count"] == sum(answer["counts"]) and answer["tokens"] is None


def test_a_text_that_is_longer_than_the_context_is_counted() -> None:
    text = "the quick fox. " * 4 * CARD.max_model_len
    assert count(prompt=[text, "a"]).json()["counts"] == [len(ids(text)), 1]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_value"),
        ({"prompt": "a", "messages": TURNS}, 400, "invalid_value"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found"),
        ({"messages": TURNS, "chat_template": "x"}, 400, "unsupported_parameter"),
    ],
)
def test_what_cannot_be_counted_is_refused(body: dict[str, Any], status: int, code: str) -> None:
    answer = count(**body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_model_without_a_chat_template_counts_prompts_only() -> None:
    app = app_of(says("x"), tokenizer=tiny(None))
    assert count(app, messages=TURNS).json()["error"]["code"] == "no_chat_template"
    assert count(app, prompt="the").status_code == 200


def test_only_models_that_the_key_may_use_count() -> None:
    app = app_of(says("x"), callers=Callers(lambda: None, lambda: 0.0, lambda: Tenant(models=frozenset({"other"}))))
    assert count(app, prompt="the").json()["error"]["code"] == "model_not_allowed"
