"""Penalties on logits: transformers' own arithmetic, each row by itself, and a whole group against a loop by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from tests.model.localgroup import LocalGroup
from tests.model.tiny import FAMILIES, oracle, prompt, save_model
from workers.penalties import bend
from workers.plan import Bend, Draw, Penalties
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

VOCABULARY = 101


def by_hand(logits: Tensor, asked: Bend) -> Tensor:
    """One row, written out."""
    wants = asked.penalties
    seen = torch.tensor([[*asked.prompt, *asked.output]], dtype=torch.int64)
    row = logits[None].clone()
    if wants.repetition != 1.0 and seen.numel():
        row = RepetitionPenaltyLogitsProcessor(wants.repetition)(seen, row)
    for id, count in Counter(asked.output).items():
        row[0, id] -= wants.frequency * count + wants.presence
    for id, value in wants.bias:
        row[0, id] += value
    row[0, list(asked.banned)] = -torch.inf
    return row[0]


def some_bend(rng: random.Random) -> Bend:
    wants = Penalties(
        presence=rng.choice([0.0, 0.7, -2.0]),
        frequency=rng.choice([0.0, 0.3, -1.0]),
        repetition=rng.choice([1.0, 1.3, 0.5]),
        bias=tuple((id, rng.uniform(-100, 100)) for id in rng.sample(range(VOCABULARY), rng.choice([0, 3]))),
    )
    said = [tuple(rng.choices(range(VOCABULARY), k=rng.choice([0, 5, 60]))) for _ in range(2)]
    return Bend(wants, tuple(dict.fromkeys(said[0])), said[1], tuple(rng.sample(range(VOCABULARY), rng.choice([0, 2]))))


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_bent_as_by_hand_and_the_others_left_alone(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    draws = [Draw(bend=some_bend(rng)) if rng.random() < 0.6 else Draw() for _ in range(9)]
    got = logits.clone()
    bend(got, draws)
    for row, draw in enumerate(draws):
        if draw.bend is None:
            assert torch.equal(got[row], logits[row])
        else:
            torch.testing.assert_close(got[row], by_hand(logits[row], draw.bend))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("penalised")
    return folder, save_model(FAMILIES["smollm2"], folder)


def greedy(model: Any, request: Request) -> list[int]:
    """What the whole sequence's logits, bent by hand, come to, token after token."""
    tokens, penalties = list(request.prompt), request.sampling.penalties
    assert penalties is not None
    stops = request.sampling.stop_ids
    while len(tokens) < request.longest:
        output = tuple(tokens[len(request.prompt) :])
        banned = tuple(stops) if len(output) < penalties.min_tokens else ()
        asked = Bend(penalties, tuple(dict.fromkeys(request.prompt)), output, banned)
        tokens.append(int(by_hand(oracle(model, tokens)[-1].float(), asked).argmax()))
        if tokens[-1] in stops:
            break
    return tokens[len(request.prompt) :]


WANTS = [
    Penalties(presence=2.0),
    Penalties(frequency=1.5),
    Penalties(repetition=1.8),
    Penalties(bias=((7, 100.0), (9, 99.5)), frequency=2.0),
    Penalties(presence=0.5, frequency=0.5, repetition=1.2, bias=((3, -100.0),), min_tokens=9),
]


@pytest.mark.parametrize(("world", "depth"), [(1, 1), (1, 2), (2, 2)])
def test_a_group_says_what_a_loop_by_hand_says(model: tuple[Path, Any], world: int, depth: int) -> None:
    folder, reference = model
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("tiny",),
        dtype="fp32",
        block_size=16,
        max_num_batched_tokens=16,
        threads=1,
        tensor_parallel_size=world,
        overlap=depth,
    )
    plain = Sampling(20, logprobs=2)
    asks = [
        Request(f"r{index}", tuple(prompt(12 + index, seed=index)), replace(plain, penalties=wants), b"n")
        for index, wants in enumerate(WANTS)
    ]
    with LocalGroup(settings, blocks=40) as group:
        alone = group.generate([Request("plain", asks[0].prompt, plain, b"n")])["plain"]
        # Whatever it would say first must not end it before nine tokens.
        ends = replace(asks[-1].sampling, stop_ids=frozenset({alone[0], *greedy(reference, asks[-1])[:3]}))
        asks[-1] = replace(asks[-1], sampling=ends)
        beside = Request("beside", asks[0].prompt, plain, b"n")
        answers = group.answers([*asks, beside])
        for ask in asks:
            want = greedy(reference, ask)
            assert list(answers[ask.id].tokens) == want, ask.sampling.penalties
            assert list(answers["beside"].tokens) == alone
        # What was said before the group died counts as said.
        sent = [replace(ask, attempt=1, resumed=answers[ask.id].tokens[:5]) for ask in asks]
        resumed = group.answers(sent)
        for ask in asks:
            assert resumed[ask.id].tokens == answers[ask.id].tokens[5:]
    assert len(answers["r4"].tokens) >= 10, "none of the first nine ends it"
    # Values are the model's own: what is banned or bent shows its raw worth.
    for ask in asks[:1]:
        told = answers[ask.id].logprobs
        assert told is not None
        tokens = (*ask.prompt, *answers[ask.id].tokens)
        raw = oracle(reference, tokens).double().log_softmax(-1)
        for place, one in enumerate(told, start=len(ask.prompt) - 1):
            assert abs(one.logprob - float(raw[place, tokens[place + 1]])) < 1e-4
            assert [id for id, _ in one.top] == raw[place].topk(2).indices.tolist()
