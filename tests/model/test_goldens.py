"""The whole group on real SmolLM2 against transformers' greedy generation, fp32, over pairwise configurations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.localgroup import LocalGroup
from workers.plan import GroupReport
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = pytest.mark.model

NEW_TOKENS = 48
LENGTHS = (700, 1, 2, 15, 16, 17, 33, 64, 400, 100, 129, 250)
MARGIN = 1e-4
"""Where transformers' two best logits lie closer than this, either token is right."""

TEXT = (
    "The harbour wakes before the town does. Nets are hung to dry along the wall, gulls argue over scraps, and the "
    "first ferry sounds its horn twice as it turns past the light. A river carries sand to the sea, the sea gives it "
    "back to the beach, and nobody can say which of the two owns it. In the market a woman sells bread, cheese, "
    "figs and honey; she counts in three languages and is never wrong. Every tide has two times in the almanac, "
    "and the old men check them against their own: 04:12 and 16:37 today, a little later tomorrow. "
)


@dataclass(frozen=True)
class Golden:
    """A prompt, what transformers continues it with, and by how much each token won."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One configuration: degree, prefix cache off, on or warm (everything sent twice), pool, chunk, overlap."""

    tp: int
    cache: str
    pool: str
    chunk: int
    depth: int


CASES = [
    Case(1, "off", "ample", 512, 1),
    Case(1, "on", "tiny", 16, 2),
    Case(2, "warm", "ample", 16, 2),
    Case(3, "warm", "ample", 512, 2),
]
SLOW_CASES = [
    Case(1, "warm", "tiny", 512, 1),
    Case(2, "on", "ample", 16, 1),
    Case(2, "off", "tiny", 512, 2),
    Case(3, "off", "tiny", 16, 1),
    Case(3, "on", "tiny", 512, 1),
]


@pytest.fixture(scope="module")
def goldens(smollm2: Path) -> list[Golden]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = AutoTokenizer.from_pretrained(smollm2)(TEXT * 8)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rng = random.Random(11)
    starts = [rng.randrange(len(text) - length) for length in LENGTHS]
    prompts = [tuple(text[start : start + length]) for start, length in zip(starts, LENGTHS, strict=True)]
    short = [prompt for prompt in prompts if len(prompt) <= 129]
    known = {}
    for batch in (short, [prompt for prompt in prompts if len(prompt) > 129]):
        known |= {golden.prompt: golden for golden in generate(model, batch)}
    return [known[prompt] for prompt in prompts]


def generate(model: Any, prompts: list[tuple[int, ...]]) -> list[Golden]:
    """transformers' greedy continuation of a left-padded batch."""
    import torch

    width = max(map(len, prompts))
    out = model.generate(
        torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = torch.stack([logits.float().topk(2).values for logits in out.logits], 1)
    margins = (tops[..., 0] - tops[..., 1]).tolist()
    tokens = out.sequences[:, width:].tolist()
    return [Golden(p, tuple(t), tuple(m)) for p, t, m in zip(prompts, tokens, margins, strict=True)]


def settings(folder: Path, case: Case) -> GroupSettings:
    return GroupSettings(
        model_dir=str(folder),
        model_names=("m",),
        tensor_parallel_size=case.tp,
        dtype="fp32",
        kv_precision=PrecisionMap.uniform(Precision.FP32),
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=max(case.chunk, 16),
        prefix_cache=case.cache != "off",
        overlap=case.depth,
        threads=2 if case.tp == 1 else 1,
    )


def requests(goldens: list[Golden], name: str) -> list[Request]:
    sampling = Sampling(NEW_TOKENS)
    return [Request(f"{name}{i}", golden.prompt, sampling, b"ns") for i, golden in enumerate(goldens)]


def compare(goldens: list[Golden], outputs: dict[str, list[int]], name: str) -> None:
    for index, golden in enumerate(goldens):
        got = outputs[f"{name}{index}"]
        assert len(got) == NEW_TOKENS
        for position, (token, want, margin) in enumerate(zip(got, golden.tokens, golden.margins, strict=True)):
            if token != want:
                assert margin < MARGIN, (
                    f"prompt of {len(golden.prompt)}: token {position} is {token}, not {want} (margin {margin:.2e})"
                )
                break  # a near tie: what follows is another text


def tiny_blocks() -> int:
    """Room for the longest request and little more, so that others must be preempted."""
    return -(-(max(LENGTHS) + NEW_TOKENS) // 16) + 6


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda c: f"tp{c.tp}-{c.cache}-{c.pool}-chunk{c.chunk}-depth{c.depth}",
)
def test_greedy_tokens_equal_transformers(case: Case, goldens: list[Golden], smollm2: Path) -> None:
    blocks = tiny_blocks() if case.pool == "tiny" else 400
    with LocalGroup(settings(smollm2, case), blocks) as group:
        compare(goldens, group.generate(requests(goldens, "a")), "a")
        if case.cache == "warm":
            compare(goldens, group.generate(requests(goldens, "b")), "b")
        check_report(case, group.report())


def check_report(case: Case, report: GroupReport) -> None:
    assert report.pool.held == 0
    if case.pool == "tiny":
        assert report.preemptions > 0, "the tiny pool was meant to force preemption"
    if case.cache == "off":
        assert report.cached_tokens == 0 and report.pool.idle == 0
    if case.cache == "warm" and case.pool == "ample":
        reusable = sum((length - 1) // 16 * 16 for length in LENGTHS)
        assert report.cached_tokens >= reusable


SEEDED = [
    Sampling(24, temperature=0.8, seed=1),
    Sampling(24, temperature=1.0, top_p=0.9, seed=2),
    Sampling(24, temperature=1.2, top_k=20, seed=3),
    Sampling(24, temperature=0.9, min_p=0.05, seed=4),
    Sampling(24, temperature=1.0, top_k=50, top_p=0.8, min_p=0.01, seed=5),
    Sampling(24, seed=6),
]


def seeded_requests(goldens: list[Golden]) -> list[Request]:
    prompts = [golden.prompt for golden in goldens if 16 <= len(golden.prompt) <= 129]
    pairs = zip(prompts, SEEDED, strict=True)
    return [Request(f"s{i}", prompt, sampling, b"ns") for i, (prompt, sampling) in enumerate(pairs)]


@pytest.fixture(scope="module")
def alone(goldens: list[Golden], smollm2: Path) -> dict[str, list[int]]:
    """Each seeded request by itself."""
    outputs: dict[str, list[int]] = {}
    with LocalGroup(settings(smollm2, Case(1, "off", "ample", 512, 1)), 400) as group:
        for request in seeded_requests(goldens):
            outputs |= group.generate([request])
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(SEEDED)
    return outputs


@pytest.mark.parametrize("tp", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_seeded_sampling_is_the_same_in_a_batch_and_over_ranks(
    tp: int, alone: dict[str, list[int]], goldens: list[Golden], smollm2: Path
) -> None:
    with LocalGroup(settings(smollm2, Case(tp, "off", "ample", 512, 1)), 400) as group:
        assert group.generate(seeded_requests(goldens)) == alone


def test_seeded_sampling_is_the_same_after_preemption(
    alone: dict[str, list[int]], goldens: list[Golden], smollm2: Path
) -> None:
    with LocalGroup(settings(smollm2, Case(1, "off", "tiny", 512, 2)), 20) as group:
        assert group.generate(seeded_requests(goldens)) == alone
        assert group.report().preemptions > 0
