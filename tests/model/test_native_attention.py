"""Native attention against the reference and against itself: the same numbers, and the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch

from kvstore.layout import KVLayout, Precision
from kvstore.table import GONE
from tests.model.attended import CPU, Attended, Step
from tests.model.builds import ALIKE, CLOSE, VARIANTS, Pair, label, one_thread
from workers.attention.backend import AttentionRule
from workers.batch import Span
from workers.kvpool import KVPool
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library, load_library
from workers.native.workspace import Workspace

pytestmark = pytest.mark.model


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    yield from one_thread(load_library(variant=request.param))


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


@pytest.mark.parametrize(
    ("heads", "ratio", "dim", "block_size"), [(3, 3, 64, 16), (2, 1, 16, 48), (1, 8, 128, 32), (2, 5, 80, 16)]
)
def test_mixed_steps_agree(build: tuple[Library, Pair], heads: int, ratio: int, dim: int, block_size: int) -> None:
    library, pair = build
    agree(MIXED, library, heads, ratio, dim, block_size=block_size, precision=pair, lengths=LENGTHS)


@pytest.mark.parametrize("ratio", [1, 2, 7])
def test_every_head_dim_agrees(fastest: Library, ratio: int) -> None:
    for dim in range(16, 257, 16):
        pair = ALIKE[(dim // 16 + ratio) % len(ALIKE)]
        agree([[(0, 35)], [(0, 1)]], fastest, 1, ratio, dim, precision=pair, lengths=(36,))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 49])
def test_every_ratio_agrees(library: Library, ratio: int) -> None:
    agree([[(0, 33), (1, 5)], [(0, 1), (1, 1)]], library, 1, ratio, 32, lengths=(34, 6))


def test_contexts_of_several_partitions_agree(build: tuple[Library, Pair]) -> None:
    library, pair = build
    steps: list[Step] = [[(0, 1000), (1, 530)], [(0, 1), (1, 500)], [(0, 100), (1, 1)]]
    agree(steps, library, 1, 3, 32, precision=pair, lengths=(1101, 1031))


@pytest.mark.parametrize("precision", [Precision.FP8_E4M3, Precision.FP8_E5M2], ids=lambda kind: kind.label)
def test_every_number_of_fp8_is_read(library: Library, precision: Precision) -> None:
    """A token that sees itself alone gets its own value: all of the format's, the subnormal ones included."""
    dtype, most = {
        Precision.FP8_E4M3: (torch.float8_e4m3fn, 448.0),
        Precision.FP8_E5M2: (torch.float8_e5m2, 57_344.0),
    }[precision]
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = torch.where(numbers.isfinite(), numbers, most)
    device = Attended(library, 1, 1, 256, precision=precision, lengths=(1,))
    device.heads[0][0, 512:] = numbers.bfloat16()
    assert torch.allclose(device.run([(0, 1)])[0][0], numbers, rtol=2**-7, atol=0.0)


def test_layers_of_several_formats_windows_and_rules_are_each_what_they_are_alone(fastest: Library) -> None:
    """One backend over groups of layers with tables of their own, whose pages lie apart."""
    int8, int4 = Precision.INT8, Precision.INT4
    kinds: list[dict[str, object]] = [
        {"precision": (int8, int4)},
        {"precision": (int4, int4), "window": 21},
        {"precision": (int8, int8), "softcap": 2.0},
        {"precision": (int8, int8), "window": 21, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ]
    alone = [Attended(fastest, 2, 2, 32, lengths=(90, 40), **kind) for kind in kinds]
    layers = tuple(device.pool.layout.layers[0] for device in alone)
    groups = len(KVLayout(16, layers).groups)
    pool = KVPool(KVLayout(16, layers), 9 * groups, CPU)
    assert set(pool.windows) == {None, 21}
    blocks = iter(random.Random(1).sample(range(9 * groups), 9 * groups))
    tables = [[tuple(islice(blocks, count)) for count in (6, 3)] for _ in range(groups)]
    rules = [AttentionRule(32**-0.5, kind.get("softcap"), kind.get("window"), kind.get("sinks")) for kind in kinds]
    together = NativeAttention(Calls(fastest, Workspace()), pool, rules)
    for step in ([(0, 33), (1, 5)], [(1, 1), (0, 50)], [(0, 1), (1, 20)]):
        batch = alone[0].batch(step)
        spans, parts = [], []
        for span, (sequence, _) in zip(batch.spans, step, strict=True):
            gone = [max(0, span.start + 1 - window) // 16 if window else 0 for window in pool.windows]
            stop = -(-span.length // 16)
            places = tuple((GONE,) * n + table[sequence][n:stop] for n, table in zip(gone, tables, strict=True))
            spans.append(Span(span.first, span.count, span.start, places))
            parts.append(alone[0].heads[sequence][span.start : span.length])
        batch = replace(batch, spans=tuple(spans))
        prepared, turns = together.prepare(batch), alone[0].turns.at(batch.positions)
        got = [together.attend(layer, torch.cat(parts), turns, prepared).float() for layer in range(len(kinds))]
        for out, device in zip(got, alone, strict=True):
            assert torch.equal(out, torch.cat(device.run(step)))


# -- the same bits in any company --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "ratio", "dim"), [(3, 3, 64), (1, 7, 48)])
def test_chunks_neighbours_and_blocks_change_no_bit(
    build: tuple[Library, Pair], heads: int, ratio: int, dim: int
) -> None:
    library, pair = build
    lengths = (150, 33, 1, 97)
    shape, options = (library, heads, ratio, dim), {"precision": pair, "lengths": lengths}
    whole = Attended(*shape, **options).walk(0, [150])
    for chunks in ([1] * 150, [16] * 9 + [6], [7] * 21 + [3], [63, 1, 86], [129, 21]):
        assert torch.equal(Attended(*shape, seed=1, **options).walk(0, chunks), whole)
    crowd = Attended(*shape, seed=2, **options)
    parts = [crowd.run([(1, 10), (0, 80), (2, 1)])[1], crowd.run([(3, 96), (1, 22), (0, 1)])[2]]
    parts.append(crowd.run([(0, 69), (3, 1), (1, 1)])[0])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("pair", [*ALIKE, (Precision.INT8, Precision.INT4)], ids=label)
def test_neither_threads_nor_the_cut_into_partitions_change_a_bit(fastest: Library, pair: Pair) -> None:
    library, lengths, dim = fastest, (1100, *[300] * 24), 32
    outputs = []
    for threads, crowd in ((1, True), (2, False), (1, False), (3, True)):
        library.threads = threads
        device = Attended(library, 1, 3, dim, precision=pair, lengths=lengths)
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
    work = next(iter(device.backend._units.values())).work
    assert (work.merge_count, work.unit_count) == (1, 4 + 2)
