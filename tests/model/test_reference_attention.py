"""Reference attention: a plain softmax in fp64 with windows, caps and sinks, in memory that no context moves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision
from kvstore.table import GONE
from tests.model.test_oom import measured
from workers.attention import tiles
from workers.attention.backend import AttentionRule
from workers.attention.reference import ReferenceAttention
from workers.batch import Batch, Span
from workers.kvpool import KVPool

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
HEADS, RATIO, DIM, BLOCK = 2, 3, 16, 4
SCALE = 0.3


class Sequences:
    """Sequences of random heads, fed to the backend through shuffled blocks. A block that no later token sees is GONE
    from its table and holds NaN, as does every slot that is not written yet."""

    def __init__(self, lengths: tuple[int, ...], rule: AttentionRule, precision: Precision = Precision.FP32) -> None:
        blocks = [-(-length // BLOCK) for length in lengths]
        self.rule = rule
        layer = LayerKV.pair(HEADS, DIM, precision, window=rule.window)
        self.pool = KVPool(KVLayout(BLOCK, (layer,)), sum(blocks) + 1, CPU)
        self.backend = ReferenceAttention(self.pool, (rule,))
        ids = random.Random(3).sample(range(sum(blocks) + 1), sum(blocks))
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]
        torch.manual_seed(5)
        self.heads = [2 * torch.randn(length, (RATIO + 2) * HEADS * DIM) for length in lengths]
        self.seen = [0] * len(lengths)
        self.pool.pages[0].fill_(255)

    def run(self, rows: tuple[tuple[int, int], ...]) -> list[Tensor]:
        """The outputs of one step, by row."""
        batch = self._batch(rows)
        parts = [self.heads[row][self.seen[row] :][:count] for row, count in rows]
        out = self.backend.attend(0, torch.cat(parts), None, self.backend.prepare(batch))
        for row, count in rows:
            self.seen[row] += count
            self._let_go(row)
        return list(out.split([count for _, count in rows]))

    def expected(self, row: int, first: int, count: int) -> Tensor:
        """A plain softmax in fp64 over the whole sequence."""
        rule, length = self.rule, first + count
        heads = self.heads[row][:length].double().unflatten(1, (-1, DIM))
        query, key, value = heads.split([RATIO * HEADS, HEADS, HEADS], 1)
        key, value = (part.repeat_interleave(RATIO, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:], key) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        places, queries = torch.arange(length), torch.arange(first, length)[:, None]
        hidden = places > queries
        if rule.window is not None:
            hidden |= places <= queries - rule.window
        scores.masked_fill_(hidden, float("-inf"))
        if rule.sinks is not None:
            scores = torch.cat((scores, rule.sinks.double()[:, None, None].expand(-1, count, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

    def _batch(self, rows: tuple[tuple[int, int], ...]) -> Batch:
        spans, first = [], 0
        for row, count in rows:
            start = self.seen[row]
            table = tuple(self.tables[row][: -(-(start + count) // BLOCK)])
            spans.append(Span(first, count, start, (table,)))
            first += count
        where = torch.cat([torch.arange(span.start, span.length) for span in spans])
        return Batch(torch.zeros_like(where), where, tuple(spans), where[:0], (), BLOCK)

    def _let_go(self, row: int) -> None:
        """Blocks before the window of the next token."""
        if self.rule.window is None:
            return
        for index in range(max(0, self.seen[row] - self.rule.window + 1) // BLOCK):
            if self.tables[row][index] != GONE:
                self.pool.pages[0][self.tables[row][index]] = 255
                self.tables[row][index] = GONE


def sinks() -> Tensor:
    return torch.linspace(-2, 3, RATIO * HEADS)


RULES = {
    "plain": AttentionRule(SCALE),
    "window": AttentionRule(SCALE, window=7),
    "wide-window": AttentionRule(SCALE, window=33),
    "one": AttentionRule(SCALE, window=1),
    "softcap": AttentionRule(SCALE, softcap=2.0),
    "sinks": AttentionRule(SCALE, sinks=sinks()),
    "all": AttentionRule(SCALE, 3.0, 19, sinks()),
}
STEPS = (((0, 60), (1, 1), (2, 9)), ((0, 1), (1, 1), (2, 1)), ((2, 30), (0, 1)), ((1, 1), (0, 17), (2, 1)), ((0, 1),))


@pytest.mark.parametrize(("tile", "block", "bucket"), [(256, 256, 32_768), (8, 6, 32_768), (5, 16, 30), (64, 1, 8)])
@pytest.mark.parametrize("name", RULES)
def test_a_plain_softmax_in_fp64(
    name: str, tile: int, block: int, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("TILE", tile), ("BLOCK", block), ("BUCKET_SLOTS", bucket)):
        monkeypatch.setattr(tiles, constant, value)
    sequences = Sequences((80, 3, 41), RULES[name])
    for step in STEPS:
        starts = list(sequences.seen)
        for (row, count), got in zip(step, sequences.run(step), strict=True):
            expected = sequences.expected(row, starts[row], count)
            assert (got.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["window", "all"])
def test_a_token_outside_of_the_window_changes_no_bit_and_one_inside_does(name: str) -> None:
    window = RULES[name].window
    assert window is not None
    outputs = []
    for changed in (None, 59 - window, 60 - window):
        sequences = Sequences((61,), RULES[name])
        if changed is not None:
            sequences.heads[0][changed] *= -1
        sequences.run(((0, 59),))
        sequences.run(((0, 1),))
        outputs.append(sequences.run(((0, 1),))[0])
    # The last token, at position 60, sees positions above 60 - window.
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    sequences = Sequences((61,), RULES[name])
    sequences.heads[0][61 - window] *= -1
    for count in (59, 1):
        sequences.run(((0, count),))
    assert not torch.equal(outputs[0], sequences.run(((0, 1),))[0])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
@pytest.mark.parametrize("window", [None, 1000])
def test_the_memory_of_a_chunk_does_not_grow_with_the_context(window: int | None, precision: Precision) -> None:
    taken = []
    for context in (4096, 16_384):
        layer = LayerKV.pair(HEADS, DIM, precision, window=window)
        pool = KVPool(KVLayout(16, (layer,)), context // 16, CPU)
        backend = ReferenceAttention(pool, (AttentionRule(SCALE, window=window),))
        span = Span(0, 256, context - 256, (tuple(range(context // 16)),))
        where = torch.arange(context - 256, context)
        batch = Batch(torch.zeros_like(where), where, (span,), where[:0], (), 16)
        heads = torch.randn(256, (RATIO + 2) * HEADS * DIM)
        step = backend.prepare(batch)  # the lists of slots, which do grow, are made here
        taken.append(measured(lambda step=step, backend=backend, heads=heads: backend.attend(0, heads, None, step)))
        lists = measured(lambda backend=backend, batch=batch: backend.prepare(batch))
        assert lists < (context if window is None else window + 256) * (HEADS + 3) * 8 + 2**20
    assert taken[1] == pytest.approx(taken[0], rel=0.1)
    assert taken[0] < 256 * 4096 * 4, "no matrix of chunk times context"
