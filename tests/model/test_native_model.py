"""A model on the native kernels gives a token the same logits to the bit, whatever else a step holds and however the
prompt came into the cache: so preemption, replay and sharing change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.tiny import FAMILIES, Ranks, oracle, prompt, row, save_model, tables
from workers.models.rope import Unsupported
from workers.selection import Wish

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

BLOCKS, BLOCK, LENGTH = 40, 16, 150
DYNAMIC = {
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
}
"""Frequencies that change with the position, from 64 tokens on."""


@pytest.fixture(
    params=[
        ("smollm2", "bf16", "auto"),
        ("qwen3", "int8", "auto"),
        ("mistral", "fp16", "auto"),
        ("smollm2", "int8", "int8"),
        ("smollm2", {"default": "int8", "layers": {0: "bf16"}}, "auto"),
        ("mistral-window", "int8", "auto"),
        ("gemma2", "bf16", "auto"),
        ("gemma3", "int8", "int8"),
        ("qwen3_moe", "bf16", "auto"),
        ("qwen3_moe", "int8", "int8"),
        ("qwen3", "fp8_e4m3", "auto"),
        ("qwen2", {"k": "int8", "v": "int4"}, "auto"),
        ("smollm2", {"default": "int4", "layers": {0: "fp8_e5m2"}}, "auto"),
    ],
    ids=[
        "smollm2-bf16",
        "qwen3-int8",
        "mistral-fp16",
        "smollm2-int8-int8",
        "smollm2-mixed",
        "mistral-window-int8",
        "gemma2-bf16",
        "gemma3-int8-int8",
        "experts-bf16",
        "experts-int8-int8",
        "qwen3-fp8",
        "qwen2-int8-int4",
        "smollm2-int4",
    ],
)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What makes ranks over one model."""
    family, precision, weights = request.param
    config = FAMILIES[family]
    if family == "mistral":
        config = type(config)(**config.to_dict() | DYNAMIC)
    save_model(config, tmp_path)
    options = {
        "blocks": BLOCKS,
        "block_size": BLOCK,
        "precision": PrecisionMap.parse(precision),
        "dtype": "bf16",
    }
    return lambda: Ranks(tmp_path, wish=Wish("native", weights), **options)


def test_neither_chunks_nor_neighbours_nor_a_cached_prefix_change_a_bit(made: Any) -> None:
    tokens = prompt(LENGTH)
    first, second, third = tables(BLOCKS, [10, 10, 5], seed=1)
    ranks = made()
    expected = ranks.walk(tokens, [LENGTH - 2, 1, 1], first)
    for chunks in ([1] * LENGTH, [16, 64, 68, 1, 1], [7] * 21 + [1, 1, 1]):
        assert torch.equal(made().walk(tokens, chunks, second)[-3:], expected)
    # Another sequence whose first blocks are the first one's; beside it a third one is prefilled and decoded.
    shared = (*first[:6], *second[6:])
    others = prompt(64, seed=9)
    ranks.logits(row(tokens[96:100], 96, shared), row(others[:50], 0, third))
    ranks.logits(row(others[50:51], 50, third), row(tokens[100 : LENGTH - 2], 100, shared))
    for index in (LENGTH - 2, LENGTH - 1):
        got = ranks.logits(row(others[index - LENGTH :], 51, third), row(tokens[index : index + 1], index, shared))
        assert torch.equal(got[1], expected[index - LENGTH])


def test_a_copied_block_and_nan_in_every_other_change_no_bit(made: Any) -> None:
    tokens = prompt(LENGTH)
    first, second = tables(BLOCKS, [10, 10], seed=2)
    ranks = made()
    expected = ranks.walk(tokens, [LENGTH - 1, 1], first)[-1]
    ranks = made()
    for page in ranks.runners[0].pool.pages:
        page.fill_(255)
    ranks.walk(tokens[:-1], [LENGTH - 1], first)
    pairs = tuple(zip(first, second, strict=True))
    got = ranks.logits(row(tokens[-1:], LENGTH - 1, second), copy=pairs, zero=first)
    assert torch.equal(got[0], expected)


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "gemma3", "phi3-longrope"])
@pytest.mark.parametrize("world", [1, 2])
def test_native_kernels_stay_close_to_transformers(tmp_path: Path, family: str, world: int) -> None:
    model = save_model(FAMILIES[family], tmp_path)
    ranks = Ranks(tmp_path, world, block_size=BLOCK, precision=Precision.BF16, dtype="bf16", kernels="native")
    tokens = prompt(60)
    # Twice, so that recorded calls are replayed: over one rank, a step of the same size runs from the tape.
    got = [ranks.walk(tokens, [40, 17, 1, 1, 1], tables(64, [4], seed=seed)[0]) for seed in (1, 2)]
    ranks.close()
    expected = oracle(model, tokens)[[39, 56, 57, 58, 59]]
    # bf16 has 8 bits of mantissa: a few per cent of the logits' spread after a few layers.
    assert (got[0] - expected).abs().mean() < 0.05 * expected.std()
    assert torch.equal(got[0], got[1])


@pytest.mark.parametrize("family", ["gpt2", "neox", "falcon-mqa", "bigcode"])
def test_a_model_that_native_kernels_cannot_compute_runs_on_torch_and_says_why(tmp_path: Path, family: str) -> None:
    model = save_model(FAMILIES[family], tmp_path)
    ranks = Ranks(tmp_path, block_size=BLOCK, precision=Precision.BF16, dtype="bf16", kernels="auto")
    choice = ranks.runners[0].choice
    assert "native" not in choice.kernels.name and "LayerNorm" in choice.why
    assert (ranks.walk(prompt(20), [19, 1], (3, 1)) - oracle(model, prompt(20))[-2:]).abs().max() < 0.15
    with pytest.raises(Unsupported, match="LayerNorm"):
        Ranks(tmp_path, block_size=BLOCK, precision=Precision.BF16, dtype="bf16", kernels="native")
