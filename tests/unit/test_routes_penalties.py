"""Penalties, bias and least lengths over HTTP: what a group is told, and where a stop string may end the text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripted import Scripted, app_of, chat, complete, says
from workers.plan import Penalties

BOTH = pytest.mark.parametrize("ask", [complete, chat], ids=["completion", "chat"])


@BOTH
@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_tokens": 0}, None),
        ({"logit_bias": {}, "presence_penalty": None}, None),
        ({"logit_bias": {"5": 0}}, None),
        ({"presence_penalty": -2}, Penalties(presence=-2.0)),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.1}, Penalties(frequency=0.5, repetition=1.1)),
        ({"logit_bias": {"5": -100, "007": 1.5}}, Penalties(bias=((5, -100.0), (7, 1.5)))),
        ({"min_tokens": 3, "max_tokens": 3}, Penalties(min_tokens=3)),
    ],
)
def test_a_group_is_told_what_was_asked_for_and_nothing_when_that_is_nothing(ask: Any, body: Any, wanted: Any) -> None:
    completer = Scripted(says("ok"))
    assert ask(app_of(completer), **body).status_code == 200
    assert completer.seen[0].sampling.penalties == wanted


@pytest.mark.parametrize("body", [{"min_tokens": 4, "max_tokens": 3}, {"min_tokens": 17}])
def test_more_tokens_at_least_than_at_most_are_refused(body: Any) -> None:
    error = complete(app_of(says("ok")), **body).json()["error"]
    assert error["param"] == "min_tokens" and "more than the" in error["message"]


def test_a_stop_string_ends_no_text_before_its_least_length() -> None:
    text = "dog dog dog dog"
    app = app_of(says(text))
    plain = complete(app, stop=["dog"]).json()
    assert plain["choices"][0]["text"] == ""
    for least in range(1, 8):
        made = complete(app, stop=["dog"], min_tokens=least).json()
        got, used = made["choices"][0]["text"], made["usage"]["completion_tokens"]
        assert text.startswith(got) and (used > least or got == text), (least, got)
        assert got == text or text[len(got) :].startswith("dog")
