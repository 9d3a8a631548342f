"""Rotary embeddings of every kind against transformers, fp32, beyond the original length where the kind allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from tests.model.test_families import TOLERANCE
from tests.model.tiny import LLAMA3_ROPE, Ranks, oracle, prompt, save_model, tables

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

ORIGINAL = 32
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 3e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": ORIGINAL},
    "yarn": YARN,
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-factor": YARN | {"attention_factor": 1.3},
}


def config(rope: dict[str, Any], reach: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=97,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=reach,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    # The dynamic kind's original length is the model's own.
    model = save_model(config(KINDS[kind], 128), tmp_path)
    tokens = prompt(100)
    ranks = Ranks(tmp_path)
    got = ranks.walk(tokens, [20, 30, 1, 48, 1], tables(64, [25])[0])
    expected = oracle(model, tokens)[[19, 49, 50, 98, 99]]
    assert (got - expected).abs().max() < TOLERANCE


def test_every_kind_turns_differently(tmp_path: Path) -> None:
    outputs = []
    for kind, rope in KINDS.items():
        folder = tmp_path / kind
        save_model(config(rope, 64 if kind == "dynamic" else 128), folder)
        outputs.append(Ranks(folder).walk(prompt(100), [64, 36], tables(64, [25])[0])[-1])
    for first in range(len(outputs)):
        for second in range(first):
            assert (outputs[first] - outputs[second]).abs().max() > 100 * TOLERANCE, (first, second)


@pytest.mark.parametrize("old", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "type")])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_older_spellings_give_the_same_logits(tmp_path: Path, kind: str, old: tuple[str, str]) -> None:
    save_model(config(KINDS[kind], 128), tmp_path)
    tokens = prompt(50)
    expected = Ranks(tmp_path).walk(tokens, [50], tables(64, [13])[0])
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    rope = content.pop("rope_parameters")
    field, key = old
    content["rope_theta"] = rope.pop("rope_theta")
    content[field] = {key: rope.pop("rope_type")} | rope
    path.write_text(json.dumps(content))
    assert torch.equal(Ranks(tmp_path).walk(tokens, [50], tables(64, [13])[0]), expected)


def test_dynamic_beyond_the_original_length_is_what_decoding_token_by_token_gives(tmp_path: Path) -> None:
    model = save_model(config(KINDS["dynamic"], ORIGINAL), tmp_path)
    tokens = prompt(60)
    # First, as transformers' model remembers the longest sequence it has seen.
    short = oracle(model, tokens[:ORIGINAL])
    cache, expected = DynamicCache(), []
    with torch.no_grad():
        for token in tokens:
            expected.append(model(torch.tensor([[token]]), cache=cache).logits[0, -1])
    table = tables(64, [15])[0]
    whole = Ranks(tmp_path).walk(tokens, [20, 40], table)
    single = Ranks(tmp_path).walk(tokens, [1] * 60, table)
    assert (single - torch.stack(expected)).abs().max() < TOLERANCE
    assert (whole[-1] - expected[-1]).abs().max() < TOLERANCE
    assert (single[:ORIGINAL] - short).abs().max() < TOLERANCE
