"""Sliding windows through a whole group: a long generation in a flat pool; no token outside of a window counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.model.localgroup import LocalGroup
from tests.model.tiny import FAMILIES, Ranks, prompt, save_model
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

WINDOW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with a window in every layer and room for long sequences."""
    path = tmp_path_factory.mktemp("windowed")
    config = FAMILIES["mistral-window"]
    config = type(config)(**{**config.to_dict(), "sliding_window": WINDOW, "max_position_embeddings": 8192})
    save_model(config, path)
    return path


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "bf16"), ("torch", "fp32")])
def test_a_generation_of_5000_tokens_keeps_the_pool_flat(folder: Path, kernels: str, dtype: str) -> None:
    """The pool has room for 192 tokens."""
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("tiny",),
        dtype=dtype,
        kernels=kernels,
        block_size=16,
        kv_memory=2**24,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        threads=1,
    )
    request = Request("r", tuple(prompt(40)), Sampling(5000), bytes(32), grant="g")
    with LocalGroup(settings, blocks=12) as group:
        engine = group.engine
        assert engine is not None
        outbox = engine.subscribe("test", lambda: None, time.monotonic())
        engine.submit("test", request)
        store, held, count = group.ranks[0].runner, [], 0
        assert store.pool.blocks == 12
        while count < 5000:
            engine.turn(time.monotonic())
            engine.renew("test", time.monotonic())
            message = outbox.read()
            if message:
                engine.ack("test", message.number)
                count += sum(len(event.tokens) for event in message.events)
                held.append(engine._scheduler.store.pool.held)
        assert max(held[100:-1]) <= (WINDOW + 16) // 16 + 1 and min(held[100:-1]) >= WINDOW // 16
        assert group.report().preemptions == 0


@pytest.mark.parametrize(("kernels", "dtype", "block"), [("native", "bf16", 16), ("torch", "fp32", 4)])
@pytest.mark.parametrize("precision", [None, Precision.INT8])
def test_a_token_counts_inside_the_window_and_not_outside(
    tmp_path: Path, kernels: str, dtype: str, block: int, precision: Precision | None
) -> None:
    """One layer, so that a window reaches no further than itself."""
    config = FAMILIES["mistral-window"]
    config = type(config)(**{**config.to_dict(), "sliding_window": WINDOW, "num_hidden_layers": 1})
    save_model(config, tmp_path)
    kept = PrecisionMap.uniform(precision or Precision.parse(dtype))
    ranks = Ranks(tmp_path, kernels=kernels, dtype=dtype, block_size=block, precision=kept)
    tokens = prompt(70)
    table = tuple(range(-(-70 // block)))

    def last(changed: int | None) -> torch.Tensor:
        given = list(tokens)
        if changed is not None:
            given[changed] = (given[changed] + 1) % 100
        return ranks.walk(given, [50, 1, 18, 1], table)[-1]

    undisturbed, first = last(None), 70 - WINDOW
    for outside in (0, first - 9, first - 1):
        assert torch.equal(last(outside), undisturbed), outside
    for inside in (first, first + 1, 60, 69):
        assert not torch.equal(last(inside), undisturbed), inside
    ranks.close()
