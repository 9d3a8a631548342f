"""Two models behind one door: each request is checked against its own model's tokenizer, context, pool and ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.coordination.cards import GroupCard
from cluster.protocol.caller import Callers
from cluster.protocol.routes import build_app
from cluster.protocol.served import ServedModel
from cluster.tenants import Tenant
from cluster.text.template import ChatTemplate
from cluster.text.tokenizer import Tokenizer
from tests.scripted import CARD, TINY, Scripted, byte_level, chat, complete, says, send

SMALL = Tokenizer(byte_level(270), ChatTemplate("{{ messages[0]['content'] }}", {}))
OTHER = replace(CARD, names=("other", "second"), max_model_len=64, vocab_size=400, pool_tokens=48, eos_ids=frozenset())
NAMES = {"tiny": "tiny", "alias/tiny": "tiny", "other": "other", "second": "other"}


def both(completer: Scripted, tenant: Tenant | None = None) -> FastAPI:
    models = [ServedModel(TINY, lambda: CARD), ServedModel(SMALL, lambda: OTHER)]
    return build_app(completer, models, callers=Callers(lambda: None, lambda: 0.0, lambda: tenant or Tenant()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ask", [complete, chat])
def test_a_request_goes_to_the_model_it_names_by_any_name(ask: Any, name: str) -> None:
    completer = Scripted(says("ok"))
    answer = ask(both(completer), model=name)
    assert answer.json()["model"] == name, "as it was asked"
    generation = completer.seen[0]
    assert generation.model == NAMES[name], "the cluster hears the canonical one"
    tokenizer, card = (TINY, CARD) if NAMES[name] == "tiny" else (SMALL, OTHER)
    turns = [{"role": "user", "content": "hi"}]
    assert generation.prompt == (tokenizer.encode("hi", 99) if ask is complete else tokenizer.encode_chat(turns, 99))
    assert generation.sampling.stop_ids == card.eos_ids


@pytest.mark.parametrize(("name", "context", "pool"), [("tiny", 512, 480), ("other", 64, 48)])
def test_each_has_its_own_context_pool_and_vocabulary(name: str, context: int, pool: int) -> None:
    def refused(**fields: Any) -> str:
        return complete(both(Scripted(says("ok"))), model=name, **fields).json()["error"]["message"]

    assert f"context holds {context} " in refused(prompt=[5] * context)
    assert f"KV cache holds {pool} " in refused(prompt=[5] * (pool - 1), max_tokens=2)
    size = (TINY if name == "tiny" else SMALL).vocabulary.size
    assert f"from 0 to {size - 1}." in refused(prompt=[size])


def test_all_are_listed_with_their_own_context() -> None:
    data = send(both(Scripted(says("ok"))), "GET", "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in data] == [
        ("tiny", 512),
        ("alias/tiny", 512),
        ("other", 64),
        ("second", 64),
    ]
    message = complete(both(Scripted(says("ok"))), model="third").json()["error"]["message"]
    assert message == "The model 'third' does not exist. Served here: tiny, alias/tiny, other, second."


@pytest.mark.parametrize("allowed", NAMES)
def test_a_tenant_uses_its_own_model_and_no_other(allowed: str) -> None:
    app = both(Scripted(says("ok")), Tenant(models=frozenset({allowed})))
    for name, canonical in NAMES.items():
        assert complete(app, model=name).status_code == (200 if canonical == NAMES[allowed] else 403)
        assert send(app, "GET", f"/v1/models/{name}").status_code == (200 if canonical == NAMES[allowed] else 403)
    shown = [model["id"] for model in send(app, "GET", "/v1/models").json()["data"]]
    assert shown == [name for name in NAMES if NAMES[name] == NAMES[allowed]]


def test_two_models_of_one_name_are_refused_at_start() -> None:
    with pytest.raises(ValueError, match="alias/tiny"):
        build_app(Scripted(says("ok")), [ServedModel(TINY, lambda: CARD), ServedModel(TINY, lambda: replace(CARD))])


def test_a_models_pool_is_the_largest_of_its_own_groups() -> None:
    def group(name: str, models: tuple[str, ...], blocks: int) -> GroupCard:
        return GroupCard(name, models, "at", blocks, 16, 8, 512, 4096)

    groups = [group("g0", ("tiny", "alias/tiny"), 10), group("g1", ("tiny",), 20), group("g2", ("other",), 900)]
    assert CARD.sized(groups).pool_tokens == 320
    assert OTHER.sized(groups).pool_tokens == 14_400
    assert CARD.sized(groups[2:]).pool_tokens is None, "while no group of it is up"
