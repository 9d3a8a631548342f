"""Where tokens lie must not matter: shuffled blocks, chunk sizes, neighbours, copies, or what unused slots hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.layout import HALVES, Precision
from kvstore.precisions import PrecisionMap
from tests.model.tiny import FAMILIES, Ranks, prompt, row, save_model, tables
from workers.attention import tiles as attention_tiles
from workers.kvpool import KVPool
from workers.plan import Draw, StepPlan

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

BLOCKS = 64
CLOSE = 2e-5
"""torch's own products differ in the last bits with the number of rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    save_model(FAMILIES["smollm2"], path)
    return path


MIXED = PrecisionMap.parse({"default": {"k": "int8", "v": "int4"}, "layers": {-1: "fp8_e4m3"}})


@pytest.fixture(
    params=[*map(PrecisionMap.uniform, Precision), MIXED], ids=lambda precision: precision.spelled(2).replace(" ", "-")
)
def ranks(folder: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield Ranks(folder, blocks=BLOCKS, precision=request.param)


def test_block_order_changes_no_bit(ranks: Ranks) -> None:
    tokens = prompt(30)
    straight = ranks.walk(tokens, [13, 1, 16], tuple(range(8)))
    shuffled = ranks.walk(tokens, [13, 1, 16], (40, 3, 63, 0, 22, 7, 1, 50))
    assert torch.equal(straight, shuffled)


@pytest.mark.parametrize("chunks", [[1] * 40, [7] * 5 + [5], [16, 16, 8], [39, 1]])
def test_chunks_give_what_the_whole_prompt_gives(ranks: Ranks, chunks: list[int]) -> None:
    tokens = prompt(40)
    whole = ranks.walk(tokens, [40], tables(BLOCKS, [10], seed=1)[0])
    pieces = ranks.walk(tokens, chunks, tables(BLOCKS, [10], seed=2)[0])
    # Where keys are rounded, a rounding may fall the other way.
    coarsest = min(precision.bits for precision in ranks.runners[0].layout.precisions)
    assert (pieces[-1] - whole[-1]).abs().max() < {32: CLOSE, 16: 0.05, 8: 0.2, 4: 1.0}[coarsest]


def unused(ranks: Ranks, used: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(block, slot) of every slot but the first used[block] of each block."""
    for block in range(BLOCKS):
        for slot in range(used.get(block, 0), ranks.block_size):
            yield block, slot


def poison(ranks: Ranks, used: dict[int, int]) -> None:
    pool = ranks.runners[0].pool
    blocks, slots = torch.tensor(list(unused(ranks, used))).unbind(1)
    rows = pool.rows(blocks * pool.block_size + slots).view(-1)
    for layer, kept in enumerate(pool.layout.layers):
        whole = pool.slots(layer)
        whole[rows // whole.shape[1], rows % whole.shape[1]] = 255  # NaN, in whatever precision
        if kept.by_channel:
            poison_channels(pool, layer, used)


def poison_channels(pool: KVPool, layer: int, used: dict[int, int]) -> None:
    """Keys and scales of every block that is not sealed, and of open blocks all that no token of theirs has written."""
    half = pool.block_size // HALVES
    width = pool.layout.layers[layer].vectors[0].bytes
    opened = pool.open_keys(layer)
    for block in range(BLOCKS):
        count = used.get(block, 0)
        is_open = 0 < count < pool.block_size
        if count < pool.block_size:
            pool.slots(layer)[block, :, :width] = 255
            pool.scales(layer)[block] = torch.nan
        for number in range(HALVES):
            held = min(max(count - number * half, 0), half) if is_open else 0
            opened[block + BLOCKS * (1 + number), :, held:] = torch.nan


def mixed_run(ranks: Ranks, poisoned: bool) -> list[torch.Tensor]:
    """Prefills, decodes of very different lengths and a chunk with history, NaN in every unused slot before each."""
    lengths = [30, 3, 17, 1]
    places = tables(BLOCKS, [10, 3, 6, 2], seed=3)
    prompts = [prompt(40, seed=length) for length in lengths]
    seen = [0] * 4
    outputs = []
    for counts in ([20, 3, 16, 1], [1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 4, 1]):
        if poisoned:
            used = {}
            for table, length in zip(places, seen, strict=True):
                for index, block in enumerate(table):
                    used[block] = min(max(length - index * ranks.block_size, 0), ranks.block_size)
            poison(ranks, used)
        rows = [
            row(tokens[start : start + count], start, table[: -(-(start + count) // ranks.block_size)])
            for tokens, start, count, table in zip(prompts, seen, counts, places, strict=True)
        ]
        outputs.append(ranks.logits(*rows))
        seen = [start + count for start, count in zip(seen, counts, strict=True)]
    return outputs


@pytest.mark.parametrize("bucket", [32_768, 40])
def test_nan_in_every_unused_slot_changes_no_bit(ranks: Ranks, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "BUCKET_SLOTS", bucket)
    clean = mixed_run(ranks, poisoned=False)
    ranks.runners[0].allocate(BLOCKS * len(ranks.runners[0].layout.groups))
    dirty = mixed_run(ranks, poisoned=True)
    for first, second in zip(clean, dirty, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


def test_neighbours_hardly_touch_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "BUCKET_SLOTS", 64)
    lengths = [50, 2, 19, 33, 48, 1, 7]
    outputs = []
    for together in (True, False):
        ranks = Ranks(folder, blocks=128)
        places = tables(128, [13] * len(lengths), seed=4)
        prompts = [prompt(length + 1, seed=length) for length in lengths]
        rows = []
        for tokens, table in zip(prompts, places, strict=True):
            ranks.logits(row(tokens[:-1], 0, table))
            rows.append(row(tokens[-1:], len(tokens) - 1, table))
        outputs.append(ranks.logits(*rows) if together else torch.cat([ranks.logits(single) for single in rows]))
    assert (outputs[0] - outputs[1]).abs().max() < CLOSE


def test_copies_read_before_they_write_and_zeroes_come_after(ranks: Ranks) -> None:
    tokens = prompt(12)
    ranks.walk(tokens, [12], (0, 1, 2))
    pool = ranks.runners[0].pool
    before = [page.clone() for page in pool.pages]
    ranks.runners[0].run(StepPlan(1, copy=((0, 1), (1, 2), (2, 9)), zero=(0, 9)))
    for page, old in zip(pool.pages, before, strict=True):
        assert torch.equal(page[1], old[0])
        assert torch.equal(page[2], old[1])
        assert not page[0].any()
        assert not page[9].any()
        assert old[2].any()


def test_a_copied_block_continues_like_the_original(ranks: Ranks) -> None:
    tokens = prompt(11)
    expected = ranks.walk(tokens, [10, 1], (0, 1, 2))[-1]
    ranks.walk(tokens[:10], [10], (10, 11, 12))
    got = ranks.logits(row(tokens[10:], 10, (10, 11, 30)), copy=((12, 30),), zero=(12,))
    assert torch.equal(got[0], expected)


def test_the_pool_starts_as_zeros_and_has_the_layout_s_bytes(folder: Path) -> None:
    runner = Ranks(folder, blocks=5, precision=Precision.BF16).runners[0]
    assert sum(page.numel() for page in runner.pool.pages) == 5 * runner.layout.block_bytes
    assert not any(page.any() for page in runner.pool.pages)
    assert runner.pool.slots(0).shape == (5, 3 * 4, 2 * 16 * 2)
    runner.pool.slots(1).flatten(0, 1)[runner.pool.rows(torch.tensor(2 * 4 + 3))[1]] = 1
    assert int((runner.pool.pages[1] != 0).sum()) == 64


def test_profile_counts_the_largest_step_and_leaves_no_pool(folder: Path) -> None:
    runner = Ranks(folder, max_num_seqs=8, max_num_batched_tokens=64).runners[0]
    assert runner.profile() >= 0
    with pytest.raises(RuntimeError, match="allocate"):
        runner.run(StepPlan(0))
    runner.allocate(4)
    assert runner.run(StepPlan(0)) == ()
    assert runner.run(StepPlan(1, (row([3], 0, (2,), Draw(temperature=0.5)),))) != ()
