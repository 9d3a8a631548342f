"""Fields: strict types, documented ranges, null as absent; what is not served is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.protocol.fields import CHAT, COMPLETION
from tests.scripted import app_of, chat, complete, says

APP = app_of(says("ok"))
BOTH = pytest.mark.parametrize("ask", [complete, chat], ids=["completion", "chat"])
BIG = 2**63


def refusal(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@BOTH
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, -(2**31), 1.5, "16", True, []]),
        ("max_completion_tokens", [0, -1, "16", 1.0]),
        ("temperature", [-0.1, 2.1, "0", True, []]),
        ("top_p", [-0.1, 1.0000001, "1", False]),
        ("min_p", [-0.1, 1.1, "0"]),
        ("top_k", [-2, 0.01, 1.0, "5", True]),
        ("seed", [2**64, BIG, -BIG - 1, 1.5, "7", True]),
        ("stream", ["true", 1, 0, "false"]),
        ("stream_options", [1, "x", [], {"include_usage": 1}]),
        ("stop", ["", [""], ["", "x"], 1, [1], {}, ["x"] * 17, "x" * 1025]),
        ("stop_token_ids", [1, ["1"], [1.5], [True], [-1], [2**40], [320], [344], [0] * 129]),
        ("ignore_eos", ["true", 1]),
        ("prompt_cache_key", [1, "x" * 257]),
        ("presence_penalty", [2.1, -2.1, "0", False]),
        ("frequency_penalty", [2.1, -2.1, [], True]),
        ("repetition_penalty", [0, -1, 10.1, "1"]),
        ("logit_bias", [[], {"cat": -100}, {"-1": 0}, {"320": 1}, {"5": 101}, {"5": "1"}, {"5": 1, "05": 2}, {"²": 1}]),
        ("logit_bias", [{str(id): 0 for id in range(301)}]),
        ("min_tokens", [-1, 1.5, "1", 10_000]),
        ("model", [None, 123, ["tiny"]]),
    ],
)
def test_a_value_of_a_wrong_type_or_out_of_range_is_a_400_that_names_the_field(
    ask: Any, field: str, values: Any
) -> None:
    for value in values:
        error = refusal(ask(APP, **{field: value}))
        assert error["param"].startswith(field), (value, error)
        assert field in error["message"]


@BOTH
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [1, 100]),
        ("temperature", [0, 0.0, 2, 1e-30, 5e-324]),
        ("top_p", [0, 1, 1e-9]),
        ("top_k", [-1, 0, 1, 9_999_999, 2**70]),
        ("seed", [0, -1, BIG - 1, -BIG]),
        ("stop", [[], "x", ["x"] * 16, "x" * 1024]),
        ("stop_token_ids", [[], [0], [319]]),
        ("presence_penalty", [2, -2, 0.5]),
        ("frequency_penalty", [2, -2, 0]),
        ("repetition_penalty", [1e-3, 1, 10]),
        ("logit_bias", [{}, {"0": -100, "319": 100}, {str(id): 0.5 for id in range(300)}]),
        ("min_tokens", [0, 1, 16]),
        ("stream_options", [{}, {"include_usage": None}, {"include_obfuscation": True}]),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(ask: Any, field: str, values: Any) -> None:
    for value in values:
        assert ask(APP, **{field: value}).status_code == 200, value


OPTIONAL = [
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "user",
]
OPTIONAL += ["logprobs", "logit_bias", "stream", "stream_options", "stop_token_ids", "ignore_eos", "prompt_cache_key"]
OPTIONAL += ["best_of", "echo", "suffix", "tools", "response_format", "presence_penalty", "frequency_penalty"]


@BOTH
def test_null_is_absent_one_by_one_and_all_at_once(ask: Any) -> None:
    for field in OPTIONAL:
        assert ask(APP, **{field: None}).status_code == 200, field
    assert ask(APP, **dict.fromkeys(OPTIONAL)).status_code == 200


@BOTH
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 2, 128, 100_000, "2", True, 1.5]),
        ("best_of", [2, 0, "1"]),
        ("response_format", [{"type": "json_object"}, {"type": "json_schema"}, "text", []]),
        ("guided_regex", ["a+"]),
        ("include_stop_str_in_output", [True]),
        ("skip_special_tokens", [False]),
    ],
)
def test_a_field_that_would_change_the_answer_and_is_not_served_is_refused_by_name(
    ask: Any, field: str, values: Any
) -> None:
    for value in values:
        error = refusal(ask(APP, **{field: value}))
        assert (error["param"], error["code"]) == (field, "unsupported_parameter"), value
        assert error["message"].startswith(f"'{field}' is not supported: ")


@pytest.mark.parametrize(
    ("ask", "field", "value"),
    [
        (complete, "suffix", "x"),
        (chat, "tools", [{"type": "function"}]),
        (chat, "tool_choice", "required"),
        (chat, "functions", [{"name": "f"}]),
        (chat, "echo", True),
        (chat, "modalities", ["text", "audio"]),
        (chat, "reasoning_effort", "high"),
        (chat, "chat_template", "{{ 1 }}"),
        (chat, "continue_final_message", True),
    ],
)
def test_a_field_of_one_route_is_refused_there(ask: Any, field: str, value: Any) -> None:
    assert refusal(ask(APP, **{field: value}))["param"] == field


@pytest.mark.parametrize(("ask", "table"), [(complete, COMPLETION), (chat, CHAT)], ids=["completion", "chat"])
def test_every_neutral_value_is_accepted(ask: Any, table: Any) -> None:
    for field, (neutral, _) in table.items():
        for value in (None, *neutral):
            assert ask(APP, **{field: value}).status_code == 200, (field, value)
    assert ask(APP, n=1.0, presence_penalty=0.0).status_code == 200


@BOTH
def test_unknown_fields_are_ignored(ask: Any) -> None:
    more = {
        "foo": 1,
        "store": True,
        "metadata": {},
        "parallel_tool_calls": False,
        "max_token": 1,
        "service_tier": "auto",
    }
    assert ask(APP, **more).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "foo", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls"),
        ("hi", "messages[0]"),
    ],
)
def test_a_message_that_is_none_is_named_by_its_place(message: Any, param: str) -> None:
    assert refusal(chat(APP, messages=[message]))["param"] == param


@pytest.mark.parametrize("messages", [[], "hi", None, {}, 1])
def test_messages_that_are_no_list_of_messages_are_refused(messages: Any) -> None:
    assert refusal(chat(APP, messages=messages))["param"] == "messages"


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], [[1], []], None, 5, {}, [1.5], [True], [1, "a"], [["a"]]]
)
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    assert refusal(complete(APP, prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[999_999], [-1], [320], [343], [344], [2**63], [[1], [320]]])
def test_a_token_id_outside_the_vocabulary_is_refused_padding_included(prompt: Any) -> None:
    error = refusal(complete(APP, prompt=prompt))
    assert error["param"] == "prompt"
    assert "from 0 to 319" in error["message"]
    assert complete(APP, prompt=[319]).status_code == 200


def test_too_many_prompts_are_refused() -> None:
    assert complete(APP, prompt=["a"] * 128).status_code == 200
    assert "at most 128" in refusal(complete(APP, prompt=["a"] * 129))["message"]


@BOTH
def test_a_limit_given_twice_with_two_values_is_refused(ask: Any) -> None:
    assert ask(APP, max_tokens=5, max_completion_tokens=5).status_code == 200
    assert refusal(ask(APP, max_tokens=5, max_completion_tokens=6))["param"] == "max_completion_tokens"


@BOTH
@pytest.mark.parametrize("model", ["no-such", "", " tiny", "tiny ", "TINY"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_404_by_status(ask: Any, model: str, stream: bool) -> None:
    answer = ask(APP, model=model, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
