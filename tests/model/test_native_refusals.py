"""What native attention refuses: pools, rows and tensors that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision
from kvstore.table import GONE
from tests.model.attended import CPU
from tests.model.builds import Pair
from workers.attention.backend import AttentionRule
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library
from workers.native.workspace import Workspace

pytestmark = pytest.mark.model


def backend(
    library: Library,
    block_size: int = 16,
    dim: int = 32,
    precision: Precision | Pair = Precision.BF16,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> NativeAttention:
    kept = precision if isinstance(precision, tuple) else (precision, precision)
    pool = KVPool(KVLayout(block_size, (LayerKV.pair(1, dim, *kept),)), 4, CPU)
    return NativeAttention(Calls(library, Workspace()), pool, (AttentionRule(dim**-0.5, None, window, sinks),))


def test_pools_that_it_cannot_read_are_refused(fastest: Library) -> None:
    odd = {"precision": (Precision.INT4, Precision.BF16)}
    for options in ({"block_size": 8}, {"dim": 24}, {"dim": 272}, {"precision": Precision.FP32}, odd):
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


def test_blocks_may_be_gone_before_the_window_only(fastest: Library) -> None:
    heads = torch.randn(2, 5 * 32).bfloat16()
    for window, taken in ((33, True), (34, False), (None, False)):
        native = backend(fastest, window=window)
        step = native.prepare(spans((0, 2, 48, (GONE, 2, 0, 1))))
        if taken:
            native.attend(0, heads, None, step)
            continue
        with pytest.raises(ValueError, match="blocks"):
            native.attend(0, heads, None, step)


def test_sinks_that_are_not_one_per_query_head_are_refused(fastest: Library) -> None:
    native = backend(fastest, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="one per query head"):
        native.attend(0, torch.randn(1, 5 * 32).bfloat16(), None, native.prepare(spans((0, 1, 0, (1,)))))


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
