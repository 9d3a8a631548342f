"""Log-probabilities of prompts and outputs against transformers' logits, over chunks, ranks, preemption and the cache;
and that nobody's tokens change because somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.localgroup import LocalGroup
from tests.model.test_goldens import TEXT as PARAGRAPH
from tests.model.tiny import FAMILIES, oracle, prompt, save_model
from workers.logprobs import Logprobs, follow
from workers.parallel import Communicator
from workers.plan import Draw, Row, Score, StepPlan, TokenEvent
from workers.sampler import sample
from workers.scoring import SLICE, Scorer, merge, reduce
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

TEXT = PARAGRAPH * 3
TOP = 5
OUTPUT = 12


# -- from logits to values ---------------------------------------------------------------------------------------------


def scored(logits: Tensor, targets: Tensor, top: int, widths: list[int]) -> tuple[Tensor, Tensor]:
    """As ranks with parts of the vocabulary do it."""
    starts = [sum(widths[:rank]) for rank in range(len(widths))]
    parts = zip(logits.split(widths, 1), starts, strict=True)
    known = [reduce(part.contiguous(), targets, top, start) for part, start in parts]
    return merge(torch.cat(known, 1), len(widths), top)


@pytest.mark.parametrize("widths", [[101], [51, 50], [34, 34, 33], [99, 1, 1]])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_values_are_those_of_a_log_softmax(widths: list[int], top: int, scale: float) -> None:
    logits = torch.randn(40, 101, generator=torch.Generator().manual_seed(3)) * scale
    targets = torch.arange(40) * 2
    values, ids = scored(logits, targets, top, widths)
    want = logits.double().log_softmax(-1)
    torch.testing.assert_close(values[:, 0].double(), want.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    best = want.sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == best.indices[:, :top].tolist()
    torch.testing.assert_close(values[:, 1:].double(), best.values[:, :top], rtol=1e-6, atol=1e-6)
    for row, target in enumerate(targets.tolist()):
        if target in ids[row].tolist():
            assert values[row, 0] == values[row, 1 + ids[row].tolist().index(target)], "clients compare the two"


@pytest.mark.parametrize("widths", [[101], [40, 61]])
def test_among_equals_the_lowest_ids_are_told_in_order_and_the_greedy_one_first(widths: list[int]) -> None:
    logits = torch.zeros(6, 101)
    logits[1, 70:80] = 1.0
    logits[2, [3, 50, 90]] = 2.0
    logits[3, 100] = 5.0
    tokens = torch.tensor(sample(logits, [Draw()] * 6))
    values, ids = scored(logits, tokens, 4, widths)
    assert ids.tolist()[:4] == [[0, 1, 2, 3], [70, 71, 72, 73], [3, 50, 90, 0], [100, 0, 1, 2]]
    assert ids[:, 0].tolist() == tokens.tolist()
    assert torch.equal(values[:, 0], values[:, 1])


def test_a_rows_values_do_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(5)) * 3
    scorer = Scorer(Communicator.alone(), lambda hidden: hidden, (49_152,), torch.device("cpu"))
    draws, tokens = [Draw(top=3)] * 64, list(range(64))
    together = scorer.of_sampled(logits, draws, tokens)
    alone = [scorer.of_sampled(logits[row : row + 1], draws[:1], tokens[row : row + 1])[0] for row in range(64)]
    assert list(together) == alone
    some = scorer.of_sampled(logits[:3], [Draw(top=1), Draw(), Draw(top=20)], tokens[:3])
    assert [None if one is None else one.top for one in some] == [1, None, 20]
    for one, whole in zip(some, together, strict=False):
        if one is not None and whole is not None:
            (mine,), (theirs,) = one, whole
            assert mine.logprob == theirs.logprob and mine.top[:1] == theirs.top[:1]
    assert scorer.of_sampled(logits[:2], [Draw(), Draw()], tokens[:2]) == ()


def test_more_likeliest_tokens_than_there_are_tokens_are_all_of_them() -> None:
    scorer = Scorer(Communicator.alone(), lambda hidden: hidden, (7,), torch.device("cpu"))
    (told,) = scorer.of_sampled(torch.randn(1, 7), [Draw(top=20)], [4])
    assert told is not None and len(next(iter(told)).top) == 7


def test_the_logits_of_a_prompt_are_there_a_slice_at_a_time() -> None:
    seen: list[int] = []

    def project(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden

    scorer = Scorer(Communicator.alone(), project, (50,), torch.device("cpu"))
    hidden = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    rows = (
        Row((1,) * 100, 7, ((0,),), None, None, Score(10, tuple(range(40)), 2)),
        Row((1,) * 50, 0, ((0,),), Draw()),
        Row((1,) * 50, 0, ((0,),), None, None, Score(0, tuple(range(49)), 3)),
    )
    first, second = scorer.of_prompts(StepPlan(0, rows), hidden)
    assert max(seen) <= SLICE and sum(seen) == 89
    want = hidden.double().log_softmax(-1)
    for told, begin, top in ((first, 3, 2), (second, 150, 3)):
        assert told.top == top
        for place, one in enumerate(told):
            row = want[begin + place]
            assert one.logprob == pytest.approx(float(row[place]), abs=1e-6)
            assert [id for id, _ in one.top] == row.topk(top).indices.tolist()
    assert scorer.of_prompts(StepPlan(0, rows[1:2]), hidden[:50]) == ()


# -- a whole group -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name in ("smollm2", "gemma2"):
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save_model(FAMILIES[name], folder)
    return made


def settings(folder: Path, **changes: Any) -> GroupSettings:
    made = GroupSettings(
        model_dir=str(folder), model_names=("tiny",), dtype="fp32", block_size=16, max_num_batched_tokens=16, threads=1
    )
    return replace(made, **changes)


def asks(count: int = 4, **sampling: Any) -> list[Request]:
    """Prompts of 30 tokens and more, a few of them one chunk after the other."""
    wanted = Sampling(OUTPUT, logprobs=TOP, prompt_logprobs=TOP)
    return [
        Request(f"r{index}", tuple(prompt(30 + 9 * index, seed=index)), replace(wanted, **sampling), b"n")
        for index in range(count)
    ]


def check(model: Any, request: Request, answer: TokenEvent, bound: float) -> None:
    """Every value of prompt and output against transformers' logits for the whole sequence."""
    tokens, length = (*request.prompt, *answer.tokens), len(request.prompt)
    want = oracle(model, tokens).double().log_softmax(-1)
    assert answer.prompt is not None and answer.logprobs is not None
    told = [*answer.prompt, *answer.logprobs]
    assert (len(answer.prompt), len(answer.logprobs)) == (length - 1, len(answer.tokens))
    for position, one in enumerate(told):
        assert abs(one.logprob - float(want[position, tokens[position + 1]])) < bound
        best = want[position].topk(TOP).values.tolist()
        assert all(abs(value - known) < bound for (_, value), known in zip(one.top, best, strict=True))
        assert all(abs(value - float(want[position, id])) < bound for id, value in one.top)


@pytest.fixture(params=[("smollm2", 1), ("smollm2", 2), ("gemma2", 1)], ids=lambda case: f"{case[0]}-tp{case[1]}")
def case(request: pytest.FixtureRequest, models: dict[str, tuple[Path, Any]]) -> Iterator[tuple[Path, Any, int]]:
    name, world = request.param
    yield *models[name], world


def test_values_are_those_of_transformers_and_tokens_are_as_ever(case: tuple[Path, Any, int]) -> None:
    folder, model, world = case
    with LocalGroup(settings(folder, tensor_parallel_size=world, overlap=2), blocks=64) as group:
        plain = group.generate(asks(logprobs=None, prompt_logprobs=None))
        told = group.answers([replace(ask, id=f"{ask.id}-told") for ask in asks()])
        for ask in asks():
            answer = told[f"{ask.id}-told"]
            assert list(answer.tokens) == plain[ask.id], "asking changes no token"
            assert answer.cached == 0, "what is scored is computed"
            check(model, ask, answer, 1e-4)


def assert_same(one: Logprobs | None, other: Logprobs | None, bound: float) -> None:
    assert one is not None and other is not None and len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        values = [mine.logprob, *(value for _, value in mine.top)]
        assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], abs=bound, rel=0)


@pytest.mark.parametrize(("dtype", "kernels", "bound"), [("fp32", "torch", 1e-4), ("bf16", "native", 0.0)])
def test_the_cache_preemption_and_a_replay_change_no_value(
    models: dict[str, tuple[Path, Any]], dtype: str, kernels: str, bound: float
) -> None:
    made = settings(models["smollm2"][0], dtype=dtype, kernels=kernels)
    with LocalGroup(made, blocks=64) as group:
        first = group.answers(asks())
        again = group.answers([replace(ask, attempt=1) for ask in asks()])
        # Only its output asks for values: the prompt may come from the cache.
        cached = group.answers([replace(ask, attempt=2) for ask in asks(prompt_logprobs=None)])
        sent = {name: answer.tokens[:5] for name, answer in first.items()}
        resumed = group.answers([replace(ask, attempt=3, resumed=sent[ask.id]) for ask in asks()])
    with LocalGroup(made, blocks=9) as group:
        pressed = group.answers(asks())
        assert group.report().preemptions > 0
    for name, answer in first.items():
        assert answer.logprobs is not None
        for other in (again[name], pressed[name]):
            assert_same(other.prompt, answer.prompt, bound)
            assert_same(other.logprobs, answer.logprobs, bound)
        assert again[name].cached == 0
        assert cached[name].cached >= 16 and cached[name].prompt is None
        assert_same(cached[name].logprobs, answer.logprobs, bound)
        assert (resumed[name].index, resumed[name].prompt) == (5, None), "that was sent before"
        assert_same(resumed[name].logprobs, answer.logprobs.since(5), bound)


@pytest.mark.parametrize(("dtype", "kernels", "bound"), [("fp32", "torch", 1e-4), ("bf16", "native", 0.0)])
def test_a_token_is_worth_the_same_in_a_prompt_as_it_was_when_it_was_drawn(
    models: dict[str, tuple[Path, Any]], dtype: str, kernels: str, bound: float
) -> None:
    made = settings(models["smollm2"][0], dtype=dtype, kernels=kernels)
    with LocalGroup(made, blocks=64) as group:
        drawn = group.answers(asks(temperature=1.0, seed=5))
        score = Sampling(0, prompt_logprobs=TOP)
        whole = [
            Request(f"whole-{ask.id}", (*ask.prompt, *drawn[ask.id].tokens), score, ask.namespace) for ask in asks()
        ]
        scores = group.answers(whole)
    for ask in asks():
        answer, rescored = drawn[ask.id], scores[f"whole-{ask.id}"]
        assert answer.prompt is not None and rescored.prompt is not None and not rescored.tokens
        assert_same(rescored.prompt, follow(answer.prompt, answer.logprobs), bound)


def test_a_prompt_of_one_token_has_nothing_to_tell(models: dict[str, tuple[Path, Any]]) -> None:
    with LocalGroup(settings(models["smollm2"][0]), blocks=16) as group:
        answer = group.answers([Request("r", (5,), Sampling(1, logprobs=0, prompt_logprobs=0), b"n")])["r"]
    assert answer.prompt == Logprobs(0) and answer.logprobs is not None and len(answer.logprobs) == 1


@pytest.mark.slow
def test_values_of_a_real_model_in_bf16_are_close_to_those_in_fp32(smollm2: Path) -> None:
    """transformers' own bf16 is as far from its fp32; 300 tokens in chunks of 128, then 40 more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = tuple(AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"][:300])
    made = settings(smollm2, dtype="bf16", block_size=32, max_num_batched_tokens=128)
    with LocalGroup(made, blocks=40) as group:
        answer = group.answers([Request("r", tokens, Sampling(40, logprobs=TOP, prompt_logprobs=TOP), b"n")])["r"]
    told = [*(answer.prompt or ()), *(answer.logprobs or ())]
    whole = torch.tensor([[*tokens, *answer.tokens]])
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        exact = model(whole).logits[0].log_softmax(-1)
        rough = model.to(torch.bfloat16)(whole).logits[0].float().log_softmax(-1)
    own = torch.tensor([one.logprob for one in told])
    places = torch.arange(len(told)), whole[0, 1:]
    ours, theirs = ((mine - exact[places]).abs() for mine in (own, rough[places]))
    print(f"ours {ours.mean():.4f} (most {ours.max():.3f}), theirs {theirs.mean():.4f} (most {theirs.max():.3f})")
    assert len(told) == 339 and ours.mean() < 0.02 and ours.max() < 0.3
