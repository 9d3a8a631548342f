"""At every KV precision a query reads what its position says, whatever the way there: the same tokens for every chunk
size, after preemption, after a replay, and over a cached prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from kvstore.precisions import PrecisionMap
from tests.model.localgroup import LocalGroup
from tests.model.tiny import prompt, save_model
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

MAPS: list[object] = [
    "bf16",
    "fp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int4",
    {"k": "int8", "v": "int4"},
    {"default": "int4", "layers": {0: "bf16", -1: "int8"}},
    "int4_channel",
    {"default": "int4_channel", "layers": {0: "bf16"}},
]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    sizes = {"vocab_size": 101, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    save_model(LlamaConfig(**sizes, **heads, max_position_embeddings=512, eos_token_id=100), path)
    return path


def block_of(kv: object) -> int:
    """Tokens of a block: as few as the kernels allow."""
    return 64 if "channel" in str(kv) else 16


def requests(size: int) -> list[Request]:
    """Lengths around the borders of blocks of `size`, two with a common head, greedy and seeded."""
    head = prompt(max(64, 2 * size), seed=9)
    first, second, *others = (prompt(count, seed=seed) for seed, count in enumerate((size - 1, size, 17, 40), 1))
    prompts = [first, second, *(head + other for other in others), [7]]
    kinds = [Sampling(NEW), Sampling(NEW, temperature=0.8, top_p=0.9, seed=3)]
    return [Request(f"r{i}", tuple(each), kinds[i % 2], bytes(32)) for i, each in enumerate(prompts)]


def group(folder: Path, kv: object, **changes: object) -> LocalGroup:
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("tiny",),
        dtype="bf16",
        kernels="native",
        kv_precision=PrecisionMap.parse(kv),
        block_size=block_of(kv),
        kv_memory=2**24,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        threads=1,
    )
    blocks = changes.pop("blocks", 64)
    assert isinstance(blocks, int)
    return LocalGroup(replace(settings, **changes), blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", MAPS, ids=str)
def test_the_way_to_a_position_changes_no_token(folder: Path, kv: object) -> None:
    asked = requests(block_of(kv))
    with group(folder, kv, prefix_cache=False) as plain:
        expected = plain.generate(asked)
    assert all(len(tokens) == NEW for tokens in expected.values())
    for tokens in (7, 48) if block_of(kv) == 16 else (7, 112):
        with group(folder, kv, max_num_batched_tokens=tokens, overlap=2) as chunked:
            assert chunked.generate(asked) == expected, f"chunks of {tokens}"
            again = [replace(request, attempt=1) for request in asked]
            assert chunked.generate(again) == expected, "what the cache holds"
            assert chunked.report().cached_tokens > 0
    with group(folder, kv, blocks=12 if block_of(kv) == 16 else 9) as pressed:  # hardly more than the longest takes
        assert pressed.generate(asked) == expected
        assert pressed.report().preemptions > 0
    with group(folder, kv) as other:
        for request in asked:
            sent = expected[request.id][:11]
            replayed = replace(request, attempt=1, resumed=tuple(sent))
            assert sent + other.generate([replayed])[request.id] == expected[request.id], "a replay"
