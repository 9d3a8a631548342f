"""Public prompts: how far a prompt runs along with one of them, and the file they come from."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.documents import DocumentError
from cluster.text.prefixes import Prefixes, common_prefix
from cluster.text.public import read_public
from tests.scripted import TINY, tiny

TOKENS = st.lists(st.integers(0, 2), max_size=9).map(tuple)
SYSTEM = "the quick brown fox jumps over the lazy dog"
# As many templates: the system's turn is shown with the user's, and must come first.
FOLDING = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[{% if loop.index0 == 1 %}"
    "{{ messages[0]['content'] }}; {% endif %}{{ message['content'] }}]{% endif %}{% endfor %}"
)


def naive(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(TOKENS, max_size=8), TOKENS)
@settings(max_examples=500)
def test_the_longest_common_prefix_is_that_of_the_best_of_all(sequences: list[tuple[int, ...]], query: Any) -> None:
    assert Prefixes(sequences).longest(query) == max((naive(one, query) for one in sequences), default=0)


@given(TOKENS, TOKENS)
def test_a_common_prefix_is_what_both_begin_with(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert common_prefix(one, other) == naive(one, other) == common_prefix(other, one)


def test_many_long_public_prompts_cost_a_prompt_little() -> None:
    head = tuple(range(4000))
    made = Prefixes([(*head, n, *head) for n in range(500)])
    began = time.perf_counter()
    for n in range(100):
        assert made.longest((*head, n, *head, 7)) == 8001
    assert time.perf_counter() - began < 0.5, "5 ms each"


def public(*prompts: dict[str, Any], template: str | None = None) -> Prefixes:
    tokenizer = TINY if template is None else tiny(template)
    return read_public(yaml.safe_dump({"prompts": list(prompts)}), {"tiny": tokenizer})["tiny"]


def test_a_text_is_shared_as_far_as_its_tokens_go() -> None:
    made = public({"text": SYSTEM})
    whole = TINY.encode(SYSTEM, 512)
    assert made.longest(TINY.encode(f"{SYSTEM}, then", 512)) in (len(whole) - 1, len(whole))
    assert made.longest(whole[:5]) == 5
    assert made.longest(TINY.encode("a slow fox", 512)) == 0


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("asked", ["a", "b", "hello", "日本"])
def test_messages_are_shared_by_every_chat_that_begins_with_them(asked: str) -> None:
    made = public({"messages": [turn("system", SYSTEM)]})
    chat = TINY.encode_chat([turn("system", SYSTEM), turn("user", asked)], 512)
    body = len(TINY.encode_chat([turn("user", asked)], 512))
    opening = len(TINY.encode("<|im_start|>user\n", 512))
    assert made.longest(chat) == len(chat) - body + opening, "all but what the user says"
    other = TINY.encode_chat([turn("system", SYSTEM + "!"), turn("user", asked)], 512)
    assert made.longest(other) < made.longest(chat)


def test_a_system_turn_that_the_template_folds_into_the_users_is_shared_too() -> None:
    tokenizer = tiny(FOLDING)
    made = public({"messages": [turn("system", SYSTEM)]}, template=FOLDING)
    chat = tokenizer.encode_chat([turn("system", SYSTEM), turn("user", "hello")], 512)
    assert made.longest(chat) >= len(TINY.encode("[" + SYSTEM, 512))


def test_messages_that_end_with_a_user_are_a_whole_chat() -> None:
    turns = [turn("system", SYSTEM), turn("user", "hi")]
    chat = TINY.encode_chat(turns, 512)
    assert public({"messages": turns}).longest(chat) == len(chat)


def test_a_prompt_is_for_its_model_or_for_all() -> None:
    both = {"tiny": TINY, "other": TINY}
    made = read_public(yaml.safe_dump({"prompts": [{"text": SYSTEM}, {"text": "日本", "model": "other"}]}), both)
    assert [made[name].longest(TINY.encode("日本", 512)) > 0 for name in both] == [False, True]
    assert [made[name].longest(TINY.encode(SYSTEM, 512)) > 0 for name in both] == [True, True]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({}, "prompts[1]: must have either text or messages"),
        ({"text": "x", "messages": [turn("user", "x")]}, "prompts[1]: must have either"),
        ({"text": ""}, "prompts[1].text"),
        ({"text": "x", "model": "huge"}, "prompts[1].model: is not served here; these are: tiny"),
        ({"messages": []}, "prompts[1].messages"),
        ({"messages": [turn("tool", "x")]}, "prompts[1].messages[0].role"),
        ({"txt": "x"}, "prompts[1].txt: unknown key"),
    ],
)
def test_a_fault_of_the_file_is_named_by_its_path(prompt: dict[str, Any], words: str) -> None:
    with pytest.raises(DocumentError) as refused:
        public({"text": "fine"}, prompt)
    assert words in str(refused.value)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system here') }}", None])
def test_what_the_template_refuses_is_said_with_its_place(template: str | None) -> None:
    text = yaml.safe_dump({"prompts": [{"messages": [turn("system", "x")]}]})
    with pytest.raises(DocumentError, match=r"prompts\[0\]: for tiny: .*template"):
        read_public(text, {"tiny": tiny(template)})
