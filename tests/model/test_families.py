"""Every family against transformers, fp32: logits after chunks and single tokens, at every degree of parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import FAMILIES, Ranks, oracle, prompt, row, save_model, tables

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 5e-5
"""Largest difference of a logit; the logits' own spread is about 1."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, config in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save_model(config, folder)
    return made


@pytest.mark.parametrize(
    ("family", "world"),
    [(family, world) for family in FAMILIES for world in (1, 2, 3, 4) if world < 4 or family in ("llama3", "qwen3")],
)
def test_logits_are_those_of_transformers(models: dict[str, tuple[Path, Any]], family: str, world: int) -> None:
    folder, model = models[family]
    ranks = Ranks(folder, world)
    tokens = prompt(40, seed=world)
    expected = oracle(model, tokens)
    chunks = [9, 1, 1, 14, 1, 7, 1, 1, 5]
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    got = ranks.walk(tokens, chunks, tables(64, [10])[0])
    ranks.close()
    assert 0.3 < expected.std() < 5
    assert (got - expected[ends]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["smollm2", "llama3"])
def test_a_rank_per_query_head_still_adds_up(models: dict[str, tuple[Path, Any]], family: str) -> None:
    folder, model = models[family]
    world = FAMILIES[family].num_attention_heads
    ranks = Ranks(folder, world)
    tokens = prompt(12)
    got = ranks.walk(tokens, [8, 1, 3], (3, 1, 2))
    ranks.close()
    assert (got - oracle(model, tokens)[[7, 8, 11]]).abs().max() < TOLERANCE


@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_every_kind_share_a_step(models: dict[str, tuple[Path, Any]], world: int) -> None:
    folder, model = models["smollm2"]
    ranks = Ranks(folder, world)
    prompts = [prompt(count, seed=count) for count in (30, 3, 17, 22, 9)]
    places = tables(64, [8, 1, 5, 6, 3])
    for tokens, table in zip(prompts[:3], places[:3], strict=True):
        ranks.logits(row(tokens[:-1], 0, table))
    ranks.logits(row(prompts[3][:10], 0, places[3]))
    step = [
        row(prompts[3][10:], 10, places[3]),
        row(prompts[0][-1:], 29, places[0]),
        row(prompts[4], 0, places[4], draw=None),
        row(prompts[1][-1:], 2, places[1]),
        row(prompts[2][-1:], 16, places[2]),
    ]
    got = ranks.logits(*step)
    ranks.close()
    expected = torch.stack([oracle(model, prompts[index])[-1] for index in (3, 0, 1, 2)])
    assert (got - expected).abs().max() < TOLERANCE


def test_sharded_files_give_the_same_model(tmp_path: Path, models: dict[str, tuple[Path, Any]]) -> None:
    model = save_model(FAMILIES["qwen3"], tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ranks = Ranks(tmp_path, 2)
    tokens = prompt(11)
    got = ranks.walk(tokens, [11], (5, 9, 7))
    ranks.close()
    assert (got - oracle(model, tokens)[-1:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kernel", ["torch-fp32", "torch-bf16", "auto"])
def test_sixteen_bit_weights_stay_close_to_the_model(models: dict[str, tuple[Path, Any]], kernel: str) -> None:
    folder, model = models["qwen3"]
    ranks = Ranks(folder, dtype="bf16", kernels=kernel)
    tokens = prompt(20)
    got = ranks.walk(tokens, [19, 1], (4, 3, 2, 1, 0))
    # bf16 has 8 bits of mantissa: a few per cent of the logits' spread after three layers.
    assert (got - oracle(model, tokens)[-2:]).abs().max() < 0.15
    assert got.dtype == torch.float32
