"""Every family through the whole engine: greedy tokens are transformers', chunked and whole, over ranks, cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.localgroup import LocalGroup
from tests.model.tiny import FAMILIES, prompt, save_model
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

NEW_TOKENS = 24
LENGTHS = (70, 3, 41, 33)
MARGIN = 1e-4
"""Where transformers' two best logits lie closer than this, either token is right."""


@dataclass(frozen=True)
class Golden:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def generate(model: Any, tokens: list[int]) -> Golden:
    """transformers' greedy continuation."""
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = torch.stack([logits[0].float().topk(2).values for logits in out.logits])
    margins = tuple((tops[:, 0] - tops[:, 1]).tolist())
    return Golden(tuple(tokens), tuple(out.sequences[0, len(tokens) :].tolist()), margins)


def settings(folder: Path, tp: int, chunk: int) -> GroupSettings:
    return GroupSettings(
        model_dir=str(folder),
        model_names=("m",),
        tensor_parallel_size=tp,
        dtype="fp32",
        kv_precision=PrecisionMap.uniform(Precision.FP32),
        block_size=16,
        kv_memory=2**24,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        threads=1,
    )


def check(golden: Golden, got: list[int]) -> None:
    assert len(got) == NEW_TOKENS
    for token, want, margin in zip(got, golden.tokens, golden.margins, strict=True):
        if token != want:
            assert margin < MARGIN, f"prompt of {len(golden.prompt)}: {token}, not {want} (margin {margin:.2e})"
            return  # a near tie: what follows is another text


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(FAMILIES[family], tmp_path)
    goldens = [generate(model, prompt(length, seed=length)) for length in LENGTHS]
    for tp, chunk in ((1, 16), (2, 256)):
        with LocalGroup(settings(tmp_path, tp, chunk), blocks=120) as group:
            for name in ("cold", "warm"):
                requests = [
                    Request(f"{name}{index}", golden.prompt, Sampling(NEW_TOKENS), b"ns")
                    for index, golden in enumerate(goldens)
                ]
                outputs = group.generate(requests)
                for index, golden in enumerate(goldens):
                    check(golden, outputs[f"{name}{index}"])
            report = group.report()
            assert report.pool.held == 0
            assert report.cached_tokens >= 64 + 32 + 32, "the second time, heads of prompts come from the cache"
