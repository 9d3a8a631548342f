"""Native attention against the reference and against itself: the same numbers, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision
from tests.model.attended import CPU, Attended, Step
from workers.attention.backend import AttentionRule
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.models.spec import Unsupported
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library, load_library
from workers.native.processor import Processor
from workers.native.workspace import Workspace
from workers.rotation import Rotation, rotate

pytestmark = pytest.mark.model

VARIANTS = [variant.name for variant in Processor.read().variants]
CLOSE = 0.02
"""Of weighted means of normal values: their own rounding to bf16 is up to 0.008."""
CACHED = (Precision.BF16, Precision.FP16, Precision.INT8)


def one_thread(library: Library) -> Iterator[Library]:
    """Where tests run side by side, two threads that wait for each other take their time."""
    before = library.threads
    library.threads = 1
    yield library
    library.threads = before


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    yield from one_thread(load_library(variant=request.param))


@pytest.fixture
def fastest() -> Iterator[Library]:
    yield from one_thread(load_library())


def agree(steps: Sequence[Step], library: Library, *shape: int, **options: object) -> None:
    """Both backends give about the same for every token of `steps`."""
    native, reference = Attended(library, *shape, **options), Attended(None, *shape, **options)
    for step in steps:
        for got, expected in zip(native.run(step), reference.run(step), strict=True):
            assert got.isfinite().all()
            assert (got - expected).abs().max() < CLOSE


MIXED: tuple[Step, ...] = (
    [(0, 20), (1, 1), (2, 65)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 17), (0, 1), (1, 15)],
    [(2, 1), (1, 1), (0, 31)],
)
"""Prefills, one-token rows, chunks with history, lengths on and beside the edges of tiles and steps."""
LENGTHS = (60, 20, 90)


@pytest.mark.parametrize("precision", CACHED, ids=lambda precision: precision.label)
@pytest.mark.parametrize(
    ("heads", "ratio", "dim", "block_size"), [(3, 3, 64, 16), (2, 1, 16, 48), (1, 8, 128, 32), (2, 5, 80, 16)]
)
def test_mixed_steps_agree(
    library: Library, heads: int, ratio: int, dim: int, block_size: int, precision: Precision
) -> None:
    agree(MIXED, library, heads, ratio, dim, block_size=block_size, precision=precision, lengths=LENGTHS)


@pytest.mark.parametrize("ratio", [1, 2, 7])
def test_every_head_dim_agrees(fastest: Library, ratio: int) -> None:
    for dim in range(16, 257, 16):
        precision = CACHED[dim // 16 % 3]
        agree([[(0, 35)], [(0, 1)]], fastest, 1, ratio, dim, precision=precision, lengths=(36,))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 49])
def test_every_ratio_agrees(library: Library, ratio: int) -> None:
    agree([[(0, 33), (1, 5)], [(0, 1), (1, 1)]], library, 1, ratio, 32, lengths=(34, 6))


@pytest.mark.parametrize("precision", CACHED, ids=lambda precision: precision.label)
def test_contexts_of_several_partitions_agree(library: Library, precision: Precision) -> None:
    steps: list[Step] = [[(0, 1000), (1, 530)], [(0, 1), (1, 500)], [(0, 100), (1, 1)]]
    agree(steps, library, 1, 3, 32, precision=precision, lengths=(1101, 1031))


# -- the same bits in any company --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "ratio", "dim", "precision"),
    [(3, 3, 64, Precision.BF16), (1, 7, 48, Precision.INT8), (2, 1, 112, Precision.FP16)],
)
def test_chunks_neighbours_and_blocks_change_no_bit(
    library: Library, heads: int, ratio: int, dim: int, precision: Precision
) -> None:
    lengths = (150, 33, 1, 97)
    shape, options = (library, heads, ratio, dim), {"precision": precision, "lengths": lengths}
    whole = Attended(*shape, **options).walk(0, [150])
    for chunks in ([1] * 150, [16] * 9 + [6], [7] * 21 + [3], [63, 1, 86], [129, 21]):
        assert torch.equal(Attended(*shape, seed=1, **options).walk(0, chunks), whole)
    crowd = Attended(*shape, seed=2, **options)
    parts = [crowd.run([(1, 10), (0, 80), (2, 1)])[1], crowd.run([(3, 96), (1, 22), (0, 1)])[2]]
    parts.append(crowd.run([(0, 69), (3, 1), (1, 1)])[0])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8], ids=lambda precision: precision.label)
def test_neither_threads_nor_the_cut_into_partitions_change_a_bit(library: Library, precision: Precision) -> None:
    lengths, dim = (1100, *[300] * 24), 32
    outputs = []
    for threads, crowd in ((1, True), (2, False), (1, False), (3, True)):
        library.threads = threads
        device = Attended(library, 1, 3, dim, precision=precision, lengths=lengths)
        # Values whose partitions' sums are large and nearly cancel: adding them in another order would show.
        device.heads[0][:, : 3 * dim] *= 0.02
        device.heads[0][:512, 4 * dim :] += 1024
        device.heads[0][512:1024, 4 * dim :] -= 1024
        chunks = [device.run([(0, 1090)])[0]]
        rows: list[tuple[int, int]] = []
        if crowd:  # so that a unit is a small part of the step and is not cut
            rows = [(sequence, 1) for sequence in range(1, len(lengths))]
            device.run([(sequence, 290) for sequence, _ in rows])
        for count in (1, 9):
            chunks.append(device.run([*rows, (0, count)])[-1])
        outputs.append(torch.cat(chunks))
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])


@pytest.mark.parametrize("window", [None, 40])
def test_units_that_cross_a_partition_are_cut_like_others(library: Library, window: int | None) -> None:
    """48 queries are 48 tokens here: some of them see nothing of a unit's last partition."""
    outputs = []
    for threads, chunks in ((1, [560]), (3, [465, 95]), (3, [511, 48, 1])):
        library.threads = threads
        outputs.append(Attended(library, 1, 1, 16, lengths=(560,), window=window).walk(0, chunks))
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


def test_a_row_that_is_most_of_a_step_is_cut_and_others_are_not(fastest: Library) -> None:
    device = Attended(fastest, 1, 3, 32, lengths=(1600, 20))
    device.run([(0, 1599)])
    device.run([(0, 1), (1, 19)])
    work = device.backend._cut_of[0].work
    assert (work.merge_count, work.unit_count) == (1, 4 + 2)


# -- window and soft cap -----------------------------------------------------------------------------------------------


def plainly(device: Attended, heads: int, ratio: int, dim: int, window: int | None, cap: float | None) -> Tensor:
    """What the first sequence's tokens should get, in fp64."""
    both = device.heads[0].double().unflatten(-1, (-1, dim))
    turned = both[:, : (ratio + 1) * heads].float().contiguous()
    rotate(turned, Rotation(Rope(theta=100.0), dim, CPU).at(torch.arange(len(both))))
    query, key = turned.bfloat16().double().split([ratio * heads, heads], 1)
    value = both[:, (ratio + 1) * heads :]
    key, value = (part.repeat_interleave(ratio, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    places = torch.arange(len(both))
    behind = places[:, None] - places
    hidden = (behind < 0) | (behind >= (window or len(both)))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1).float()


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8], ids=lambda precision: precision.label)
@pytest.mark.parametrize(("window", "cap"), [(1, None), (17, None), (64, 2.0), (100, None), (600, None), (None, 3.0)])
def test_window_and_soft_cap(library: Library, window: int | None, cap: float | None, precision: Precision) -> None:
    length, shape = 640 if window == 600 else 180, (2, 3, 32)
    options = {"precision": precision, "lengths": (length,), "window": window, "softcap": cap}
    device = Attended(library, *shape, **options)
    whole = device.walk(0, [length])
    assert (whole - plainly(device, *shape, window, cap)).abs().max() < (CLOSE if precision is Precision.BF16 else 0.04)
    tail = Attended(library, *shape, seed=3, **options)
    assert torch.equal(tail.walk(0, [length - 39, 1, 7, 31]), whole)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8], ids=lambda precision: precision.label)
def test_what_lies_before_the_window_is_never_read(library: Library, precision: Precision) -> None:
    window, outputs = 36, []
    for poisoned in (False, True):
        device = Attended(library, 2, 3, 32, precision=precision, lengths=(200,), window=window)
        device.run([(0, 180)])
        first = 180 - window + 1  # what the next token sees first: an odd slot
        if poisoned:
            for block in device.tables[0][: first // 16]:
                device.pool.pages[0][block].fill_(255)
            for position in range(first // 16 * 16, first):
                device.store_nan(0, position)
        outputs.append(torch.cat([*device.run([(0, 1)]), *device.run([(0, 19)])]))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])


# -- extreme values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", CACHED, ids=lambda precision: precision.label)
def test_one_key_that_outweighs_all_others(library: Library, precision: Precision) -> None:
    """Scores of several hundred, rising step by step: the weights' reference point moves again and again."""
    device = Attended(library, 1, 1, 16, precision=precision, lengths=(300,))
    rise = torch.linspace(0, 40, 300)[:, None]
    device.heads[0][:, :16] = 10.0
    device.heads[0][:, 16:32] = rise.expand(-1, 16)
    device.turns = _Still()
    got = device.walk(0, [300])
    value = device.heads[0][:, 32:].float()
    expected = torch.stack([_last_weighted(rise[: i + 1, 0], value[: i + 1]) for i in range(300)])
    assert (got - expected).abs().max() < (0.1 if precision is Precision.INT8 else 0.05)


class _Still:
    """Turns by nothing."""

    def at(self, positions: Tensor) -> Tensor:
        return torch.ones(len(positions), 1, 8, dtype=torch.complex64)


def _last_weighted(rise: Tensor, value: Tensor) -> Tensor:
    scores = rise.bfloat16().double() * 10.0 * 16 * 16**-0.5
    return (scores.softmax(0)[:, None] * value.double()).sum(0).float()


def test_a_nan_in_one_row_stays_in_it(library: Library) -> None:
    device, clean = (Attended(library, 1, 3, 32, lengths=(40, 40)) for _ in range(2))
    device.heads[0][5] = float("nan")
    got, expected = device.run([(0, 40), (1, 40)]), clean.run([(0, 40), (1, 40)])
    assert got[0][6:].isnan().all()
    assert torch.equal(got[1], expected[1])


# -- what is refused ---------------------------------------------------------------------------------------------------


def backend(library: Library, block_size: int = 16, dim: int = 32, precision: Precision = Precision.BF16) -> object:
    pool = KVPool(KVLayout(block_size, (LayerKV.pair(1, dim, precision),)), 4, CPU)
    return NativeAttention(Calls(library, Workspace()), pool, (AttentionRule(dim**-0.5),))


def test_pools_that_it_cannot_read_are_refused(fastest: Library) -> None:
    for options in ({"block_size": 8}, {"dim": 24}, {"dim": 272}, {"precision": Precision.FP32}):
        with pytest.raises(Unsupported):
            backend(fastest, **options)


def spans(*rows: tuple[int, int, int, tuple[int, ...]]) -> Batch:
    tokens = torch.zeros(sum(count for _, count, _, _ in rows), dtype=torch.int64)
    placed = tuple(Span(first, count, start, (table,)) for first, count, start, table in rows)
    return Batch(tokens, tokens, placed, tokens[:0], (), 16)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, 16, (2,))],
        [(0, 17, 0, (2,))],
        [(0, 1, 0, (4,))],
        [(0, 1, 0, (-1,))],
        [(0, 1, 0, (1,)), (2, 1, 0, (2,))],
        [(0, 1, -1, (1,))],
    ],
)
def test_rows_that_do_not_fit_the_pool_never_reach_it(
    fastest: Library, rows: list[tuple[int, int, int, tuple[int, ...]]]
) -> None:
    native = backend(fastest)
    batch = spans(*rows)
    heads = torch.randn(len(batch.tokens), 5 * 32).bfloat16()
    with pytest.raises(ValueError, match="blocks"):
        native.attend(0, heads, None, native.prepare(batch))
    with pytest.raises(ValueError):  # once more, now that it knows the number of heads
        native.attend(0, heads, None, native.prepare(batch))


def test_tensors_that_do_not_fit_the_step_are_refused(fastest: Library) -> None:
    native = backend(fastest)
    step = native.prepare(spans((0, 2, 0, (1,))))
    good, turns = torch.randn(2, 5 * 32).bfloat16(), torch.ones(2, 1, 16, dtype=torch.complex64)
    native.attend(0, good, turns, step)
    for heads in (good.float(), good[:1], good.repeat(1, 2)[:, ::2], good[:, :64], good[:, :-16]):
        with pytest.raises(ValueError, match="heads"):
            native.attend(0, heads, turns, step)
    for other in (turns[:1], torch.ones(2, 1, 16), turns.expand(2, 16, 16)[:, :1].transpose(0, 2)):
        with pytest.raises(ValueError, match="turns"):
            native.attend(0, good, other, step)
    with pytest.raises(ValueError, match="prepare"):
        native.attend(0, good, turns, None)
