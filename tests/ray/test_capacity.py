"""How many tokens the same memory holds at each KV precision, as the running service counts it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deploy.config import ClusterConfig
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from tests.ray.stage import PATIENCE_S, Stage, write_tiny_model
from workers.models.reading import read_native

BUDGET = 8 * 2**20
MAPS = {
    "bf16": "bf16",
    "fp8": "fp8_e4m3",
    "int8": "int8",
    "int4": "int4",
    "channel": "int4_channel",
    "recommended": {"k": "int8", "v": "int4"},
    "layered": {"default": "int8", "layers": {"0": "bf16"}},
}
BLOCKS = dict.fromkeys(MAPS, 16) | {"channel": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "wide", smollm2, head_dim=64)


@pytest.fixture(scope="module")
def all_maps(stage: Stage, model: Path, port: int) -> Stage:
    section = {"model": str(model), "dtype": "bf16", "threads": 1, "max_model_len": 512, "kv_memory": BUDGET}
    models = [
        section | {"served_model_names": [name], "block_size": BLOCKS[name], "kv_precision": kv}
        for name, kv in MAPS.items()
    ]
    return stage.show(ClusterConfig.model_validate({"models": models, "port": port, "device": "cpu", "drain_s": 2.0}))


def test_the_same_memory_holds_more_tokens_at_a_lower_precision(all_maps: Stage, model: Path) -> None:
    groups = {group["models"][0]: group for group in all_maps.groups()}
    tokens = {name: group["pool"]["total"] * group["block_size"] for name, group in groups.items()}
    ratio = {name: count / tokens["bf16"] for name, count in tokens.items()}
    assert ratio["int8"] >= 1.88 and ratio["fp8"] >= 1.88
    assert min(ratio["int4"], ratio["channel"]) >= 3.4 and ratio["recommended"] >= 2.3
    assert 1.25 < ratio["layered"] < ratio["int8"]
    spec = read_native(model)
    for name, kv in MAPS.items():
        (layout,) = spec.layout(BLOCKS[name], PrecisionMap.parse(kv).settle(Precision.BF16), 1)
        (rank,) = groups[name]["ranks"]
        blocks = BUDGET // layout.block_bytes
        assert (groups[name]["blocks"], rank["pool_bytes"]) == (blocks, blocks * layout.block_bytes)
        assert rank["block_bytes"] == layout.block_bytes and rank["kv"] == layout.text


@pytest.mark.parametrize("name", MAPS)
def test_every_precision_answers_and_gives_its_blocks_back(all_maps: Stage, name: str) -> None:
    body = {"model": name, "prompt": list(range(100, 240)), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answers = [httpx.post(f"{all_maps.url}/v1/completions", json=body, timeout=PATIENCE_S).json() for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [40, 40]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"], "the cached prompt reads differently"
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
