"""Attention over MLA's latents against a plain softmax over expanded keys and values in fp64, at every precision."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision
from tests.model.test_oom import measured
from workers.attention import formats, tiles
from workers.attention.backend import AttentionRule, Expansion
from workers.attention.latent import LatentAttention
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.models.shapes import LatentShape
from workers.models.spec import Unsupported
from workers.rotation import Rotation, rotate

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUES, RANK = 3, 8, 4, 12, 32
"""Chunks of 15 tokens and more are expanded."""
BLOCK = 16
SCALE = 0.4


class Latents:
    """Sequences with heads made up beforehand, a pool whose unused slots hold NaN, and a backend in fp32."""

    def __init__(self, precision: Precision, lengths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(5)
        needed = [-(-length // BLOCK) for length in lengths]
        self.pool = KVPool(KVLayout(BLOCK, (LayerKV.latent(RANK, ROPE, precision),)), sum(needed) + 1, CPU)
        self.pool.pages[0].fill_(255)
        order = random.Random(3).sample(range(sum(needed) + 1), sum(needed))
        self.tables = [tuple(order.pop() for _ in range(count)) for count in needed]
        self.expansion = Expansion(
            LatentShape(RANK, ROPE, NOPE, VALUES, None, interleaved=True),
            torch.randn(HEADS, NOPE, RANK, generator=generator),
            torch.randn(HEADS, VALUES, RANK, generator=generator),
        )
        width = HEADS * (NOPE + ROPE) + RANK + ROPE
        self.heads = [torch.randn(length, width, generator=generator) for length in lengths]
        self.backend = LatentAttention(self.pool, (AttentionRule(SCALE, expansion=self.expansion),))
        self._rotation = Rotation(Rope(theta=100.0), ROPE, CPU)
        self._seen = [0] * len(lengths)

    def run(self, step: Sequence[tuple[int, int]]) -> list[Tensor]:
        """(sequence, tokens) of each row → its outputs [tokens, HEADS * VALUES]."""
        spans, first = [], 0
        for sequence, count in step:
            spans.append(Span(first, count, self._seen[sequence], (self.tables[sequence],)))
            first += count
        positions = torch.cat([torch.arange(span.start, span.length) for span in spans])
        heads = torch.cat([self.heads[sequence][self._seen[sequence] :][:count] for sequence, count in step])
        batch = Batch(torch.zeros_like(positions), positions, tuple(spans), positions[:0], (), BLOCK)
        out = self.backend.attend(0, heads, self._rotation.at(positions), self.backend.prepare(batch))
        for sequence, count in step:
            self._seen[sequence] += count
        return list(out.split([count for _, count in step]))

    def expected(self, sequence: int) -> Tensor:
        """All outputs of a sequence, from what the precision keeps of its latents."""
        heads = self.heads[sequence].clone()
        queries, latents = heads.split((HEADS * (NOPE + ROPE), RANK + ROPE), -1)
        queries = queries.unflatten(-1, (HEADS, -1))
        turns = self._rotation.at(torch.arange(len(heads)))
        rotate(queries[..., NOPE:], turns)
        rotate(latents[:, None, RANK:], turns)
        kept, rotated = (
            formats.decode(formats.encode(part, vector.precision), vector.precision, torch.empty(part.shape)).double()
            for part, vector in zip(latents.split((RANK, ROPE), -1), self.pool.layout.layers[0].vectors, strict=True)
        )
        keys = torch.einsum("tr,hnr->htn", kept, self.expansion.keys.double())
        keys = torch.cat((keys, rotated.expand(HEADS, -1, -1)), -1)
        values = torch.einsum("tr,hvr->htv", kept, self.expansion.values.double())
        scores = SCALE * torch.einsum("thn,hsn->hts", queries.double(), keys)
        scores.masked_fill_(torch.ones(len(heads), len(heads), dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("hts,hsv->thv", scores.softmax(-1), values).flatten(1).float()


@pytest.mark.parametrize(
    "precision", [one for one in Precision if not one.by_channel], ids=lambda precision: precision.label
)
def test_rows_of_all_kinds_attend_as_a_plain_softmax_does(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE", 24)
    monkeypatch.setattr(tiles, "BLOCK", 30)
    monkeypatch.setattr(tiles, "BUCKET_SLOTS", 64)
    lengths = (107, 61, 33, 80)
    device = Latents(precision, lengths)
    steps = [
        [(0, 14), (1, 15), (2, 1)],
        [(3, 64), (2, 1), (0, 1), (1, 1)],
        [(0, 70), (3, 1)],
        [(0, 1), (1, 1), (2, 1), (3, 1)],
        [(1, 44), (2, 30), (3, 14), (0, 21)],
    ]
    got: list[list[Tensor]] = [[] for _ in lengths]
    for step in steps:
        for (sequence, _), part in zip(step, device.run(step), strict=True):
            got[sequence].append(part)
    for sequence, length in enumerate(lengths):
        whole, expected = torch.cat(got[sequence]), device.expected(sequence)
        assert whole.shape == (length, HEADS * VALUES)
        assert (whole - expected).abs().max() < 2e-5 * expected.abs().max()


def test_absorbed_and_expanded_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for expands in (True, False):
        device = Latents(Precision.INT8, (300,))
        monkeypatch.setattr(LatentShape, "expands", lambda *_, expands=expands: expands)
        outputs.append(torch.cat([part for count in (90, 5, 205) for part in device.run([(0, count)])]))
    assert not torch.equal(*outputs)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5 * outputs[0].abs().max()


@pytest.mark.parametrize("expands", [True, False])
def test_what_a_chunk_takes_does_not_grow_with_its_context(monkeypatch: pytest.MonkeyPatch, expands: bool) -> None:
    taken = []
    for context in (4096, 16_384):
        device = Latents(Precision.INT8, (context,))
        monkeypatch.setattr(LatentShape, "expands", lambda *_, expands=expands: expands)
        device._seen[0] = context - 256
        index = 8 * context  # its slots
        taken.append(measured(lambda device=device: device.run([(0, 256)])) - index)
    assert abs(taken[1] - taken[0]) < 0.1 * taken[0]


def test_rules_that_it_does_not_know_are_refused() -> None:
    device = Latents(Precision.BF16, (1,))
    for rule in (
        AttentionRule(1.0, softcap=3.0, expansion=device.expansion),
        AttentionRule(1.0, window=3, expansion=device.expansion),
        AttentionRule(1.0, sinks=torch.zeros(HEADS), expansion=device.expansion),
    ):
        with pytest.raises(Unsupported, match="windows"):
            LatentAttention(device.pool, (rule,))
    with pytest.raises(ValueError, match="expansion"):
        LatentAttention(device.pool, (AttentionRule(1.0),))
