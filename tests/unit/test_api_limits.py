"""From a request to generations: what it may cost, how it is sampled, which session it belongs to."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from cluster.generation import Generation, ModelCard
from cluster.protocol.routes import build_app
from cluster.protocol.served import ServedModel
from tests.scripted import CARD, END, TINY, Call, Scripted, app_of, chat, complete, ids, says, send
from workers.sequence import Priority

ROOMY = replace(CARD, pool_tokens=None)
LIMIT = ROOMY.max_model_len


def asked(ask: Any = complete, card: ModelCard = CARD, **body: Any) -> Generation:
    """The generation that a request becomes."""
    completer = Scripted(says("ok"))
    answer = ask(app_of(completer, card), **body)
    assert answer.status_code == 200, answer.text
    return completer.seen[0]


def refused(ask: Any = complete, card: ModelCard = CARD, **body: Any) -> dict[str, Any]:
    answer = ask(app_of(says("ok"), card), **body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize("prompt", [LIMIT - 2, LIMIT - 1])
def test_a_default_limit_shrinks_to_what_the_context_leaves(prompt: int) -> None:
    assert asked(card=ROOMY, prompt=[5] * prompt).sampling.max_tokens == LIMIT - prompt


@pytest.mark.parametrize("prompt", [LIMIT, LIMIT + 1, LIMIT + 150])
def test_a_prompt_that_leaves_no_room_is_refused_with_its_length_and_the_limit(prompt: int) -> None:
    error = refused(card=ROOMY, prompt=[5] * prompt)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"The prompt has {prompt} tokens; the model's context holds {LIMIT} for prompt and answer together."
    )


@pytest.mark.parametrize("most", [LIMIT - 2, 10**8, 2**63])
def test_a_limit_that_the_context_cannot_keep_is_refused_with_the_numbers(most: int) -> None:
    error = refused(card=ROOMY, prompt=[5] * 3, max_tokens=most)
    assert f"has 3 tokens and max_tokens is {most}, together {most + 3}" in error["message"]
    assert asked(card=ROOMY, prompt=[5] * 3, max_tokens=LIMIT - 3).sampling.max_tokens == LIMIT - 3


def test_what_no_pool_can_hold_is_refused_with_the_numbers_and_fits_where_it_can() -> None:
    error = refused(prompt=[5] * 400, max_tokens=81)
    assert error["code"] == "never_fits"
    assert "400 tokens and max_tokens is 81, together 481; the cluster's KV cache holds 480" in error["message"]
    assert asked(prompt=[5] * 400, max_tokens=80).sampling.max_tokens == 80
    assert asked(card=ROOMY, prompt=[5] * 400, max_tokens=81).sampling.max_tokens == 81


def test_defaults_are_openais_sixteen_for_completions_and_all_that_is_left_for_chats() -> None:
    assert asked().sampling.max_tokens == 16
    generation = asked(chat)
    assert generation.sampling.max_tokens == 480 - len(generation.prompt)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_either_name_limits_either_route(ask: Any, field: str) -> None:
    limit: dict[str, Any] = {field: 3}
    assert asked(ask, **limit).sampling.max_tokens == 3


def test_text_and_its_token_ids_make_the_same_prompt() -> None:
    assert asked(prompt="the fox").prompt == asked(prompt=list(ids("the fox"))).prompt == ids("the fox")


def test_sampling_arrives_as_asked_and_defaults_are_openais() -> None:
    given: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}
    for ask in (complete, chat):
        sampling = asked(ask, **given).sampling
        assert {name: getattr(sampling, name) for name in given} == given
        plain = asked(ask).sampling
        assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)


def test_zero_is_a_value_and_not_absence() -> None:
    assert asked(temperature=0).sampling.temperature == 0
    assert asked(seed=0).sampling.seed == 0
    greedy = asked(temperature=1, top_p=0).sampling
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(("top_k", "means"), [(-1, 0), (0, 0), (1, 1), (343, 343), (344, 0), (2**70, 0)])
def test_a_top_k_that_keeps_everything_is_off(top_k: int, means: int) -> None:
    assert asked(top_k=top_k).sampling.top_k == means


def test_a_seed_is_fixed_here_and_fits_63_bits() -> None:
    assert asked(seed=-1).sampling.seed == 2**63 - 1
    assert asked(seed=-(2**63)).sampling.seed == 0
    drawn = {asked().sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_end_tokens_stop_unless_they_are_ignored_or_asked_for() -> None:
    assert asked().sampling.stop_ids == {END}
    assert asked(stop_token_ids=[7, END]).sampling.stop_ids == {7, END}
    assert asked(ignore_eos=True).sampling.stop_ids == frozenset()
    assert asked(ignore_eos=True, stop_token_ids=[7]).sampling.stop_ids == {7}


def test_a_control_token_as_a_stop_string_stops_by_its_id() -> None:
    assert asked(stop=["<s>", "fox"]).sampling.stop_ids == {END, TINY.special_id("<s>")}


def test_the_session_is_the_header_before_the_cache_key_and_both_are_bounded() -> None:
    def session(headers: dict[str, str], **body: Any) -> Any:
        completer = Scripted(says("ok"))
        content = {"model": "tiny", "prompt": "hi"} | body
        answer = send(app_of(completer), "POST", "/v1/completions", json=content, headers=headers)
        return completer.seen[0].session if answer.status_code == 200 else answer.json()["error"]["param"]

    assert session({}) is None
    assert session({"x-session-id": "s"}, prompt_cache_key="k") == "s"
    assert session({}, prompt_cache_key="k") == "k"
    assert session({"x-session-id": ""}, prompt_cache_key="") is None
    assert session({"x-session-id": "s" * 256}) == "s" * 256
    assert session({"x-session-id": "s" * 257}) == "x-session-id"


def test_generations_are_named_by_us_and_carry_model_tenant_and_class() -> None:
    completer = Scripted(says("ok"))
    app = app_of(completer)
    for _ in range(2):
        content = {"model": "alias/tiny", "prompt": ["a", "b"]}
        answer = send(app, "POST", "/v1/completions", json=content, headers={"x-request-id": "mine"})
        assert answer.json()["model"] == "alias/tiny"
    names = [generation.id for generation in completer.seen]
    assert len(set(names)) == 4
    assert not any("mine" in name for name in names)
    first = completer.seen[0]
    assert (first.model, first.tenant, first.priority) == ("tiny", "default", Priority.INTERACTIVE)


def test_the_card_is_asked_anew_at_every_request() -> None:
    cards = [ROOMY, replace(CARD, pool_tokens=20)]
    app = build_app(Scripted(says("ok")), [ServedModel(TINY, lambda: cards[0])])
    assert complete(app, prompt=[5] * 10, max_tokens=11).status_code == 200
    cards.reverse()
    assert complete(app, prompt=[5] * 10, max_tokens=11).status_code == 400


def test_content_parts_are_the_joined_string() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert asked(chat, messages=[{"role": "user", "content": parts}]).prompt == (
        asked(chat, messages=[{"role": "user", "content": "abcd"}]).prompt
    )


def test_an_assistant_turn_at_the_end_is_not_continued_in_either_form() -> None:
    text, parts = ([{"role": "assistant", "content": one}] for one in ("ab", [{"type": "text", "text": "ab"}]))
    assert asked(chat, messages=text).prompt == asked(chat, messages=parts).prompt
    assert asked(chat, messages=text).prompt[-3:] == asked(chat).prompt[-3:], "a new turn is opened"


def test_a_developer_turn_is_a_system_turn() -> None:
    turns = [[{"role": role, "content": "x"}] for role in ("developer", "system")]
    assert asked(chat, messages=turns[0]).prompt == asked(chat, messages=turns[1]).prompt


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    async def main() -> tuple[float, int]:
        card = replace(ROOMY, max_model_len=10**6)
        app = app_of(says("ok"), card)
        text = "the quick brown fox jumps over the lazy dog " * 10_000
        call = Call(app, "/v1/completions", b'{"model": "tiny", "prompt": "%s"}' % text.encode())
        worst, last = 0.0, time.perf_counter()
        while call.writes.empty():
            await asyncio.sleep(0)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        return worst, await call.status()

    worst, status = asyncio.run(main())
    assert status == 200
    assert worst < 0.15
