"""Vectors in every precision: how far off they may be, on easy and on nasty ones, and that each stands by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore.layout import Precision, Vector
from workers.attention.formats import decode, encode, fault

pytestmark = pytest.mark.model

DIM = 64
BY_TOKEN = [precision for precision in Precision if not precision.by_channel]
RELATIVE = {
    Precision.FP32: 0.0,
    Precision.BF16: 2**-8,
    Precision.FP16: 2**-11,
    Precision.FP8_E4M3: 2**-4,
    Precision.FP8_E5M2: 2**-3,
}
"""Of an element, where it is no subnormal number."""
STEP = {Precision.INT8: 1 / 127, Precision.FP8_E4M3: 2**-9 / 448 * 1.01, Precision.FP8_E5M2: 2**-16 / 57_344 * 1.01}
"""Of a vector's largest magnitude: what separates the smallest numbers."""


def back(vectors: Tensor, precision: Precision) -> Tensor:
    stored = encode(vectors, precision)
    assert stored.dtype == torch.uint8 and stored.shape == (
        *vectors.shape[:-1],
        precision.vector_bytes(vectors.shape[-1]),
    )
    flat = stored.view(-1, stored.shape[-1])
    return decode(flat, precision, torch.empty(len(flat), vectors.shape[-1])).view(vectors.shape)


def drawn(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(200, 3, DIM, generator=generator)
    match kind:
        case "of all sizes":
            vectors *= torch.logspace(-4, 4, 200)[:, None, None]
        case "with outliers":
            vectors[..., 5] *= 300.0
        case "constant":
            vectors = vectors[..., :1].expand(-1, -1, DIM).contiguous()
        case "far from zero":
            vectors += 40.0
        case "tiny":
            vectors *= 1e-30
        case "huge":
            vectors *= 1e30
    return vectors


KINDS = ("plain", "of all sizes", "with outliers", "constant", "far from zero", "tiny", "huge")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", BY_TOKEN, ids=lambda precision: precision.label)
def test_every_vector_comes_back_within_its_precision(precision: Precision, kind: str) -> None:
    vectors = drawn(kind)
    if precision is Precision.FP16 and kind in ("tiny", "huge"):
        pytest.skip("fp16 has no such numbers")
    error = (back(vectors, precision) - vectors).abs()
    most = vectors.abs().amax(-1, keepdim=True)
    if precision is Precision.INT4:
        # Half a step of the span, and what bf16 loses of lowest value and step.
        span = vectors.amax(-1, keepdim=True) - vectors.amin(-1, keepdim=True)
        allowed = span * (0.5 / 15 + 2**-7) + most * 2**-8
    else:
        allowed = vectors.abs() * RELATIVE.get(precision, 0.0) + most * STEP.get(precision, 0.0) * 0.501
    least = 2**-25 if precision is Precision.FP16 else 1e-38  # half of the smallest number
    assert (error <= allowed * 1.001 + least).all()


@pytest.mark.parametrize("precision", BY_TOKEN, ids=lambda precision: precision.label)
def test_zeros_stay_zeros(precision: Precision) -> None:
    assert not back(torch.zeros(4, DIM), precision).any()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
@pytest.mark.parametrize("precision", BY_TOKEN, ids=lambda precision: precision.label)
def test_a_spoiled_vector_spoils_no_other(precision: Precision, odd: float) -> None:
    vectors = drawn("plain")
    spoiled = vectors.clone()
    spoiled[7, 1, 9] = odd
    clean, mixed = back(vectors, precision), back(spoiled, precision)
    mixed[7, 1] = clean[7, 1]
    assert torch.equal(clean, mixed)


def test_the_largest_number_of_e5m2_stays_finite() -> None:
    vectors = torch.full((1000, DIM), 1.0) * torch.rand(1000, 1, generator=torch.Generator().manual_seed(1))
    assert back(vectors, Precision.FP8_E5M2).isfinite().all()


def test_rows_that_lie_apart_are_read() -> None:
    """A slot holds a key and a value behind each other, in whatever precisions."""
    keys, values = drawn("plain")[:, 0], drawn("of all sizes")[:, 0]
    for first in BY_TOKEN:
        for second in BY_TOKEN:
            stored = torch.cat((encode(keys, first), encode(values, second)), -1)
            size = first.vector_bytes(DIM)
            for part, vectors, precision in ((stored[:, :size], keys, first), (stored[:, size:], values, second)):
                assert torch.equal(decode(part, precision, torch.empty(200, DIM)), back(vectors, precision))


def test_sizes_that_cannot_be_read_are_named() -> None:
    assert fault((Vector(64, Precision.INT4), Vector(64, Precision.BF16))) == ""
    assert "multiple of 4" in fault((Vector(18, Precision.INT8),) * 2)
    assert "multiple of 8" in fault((Vector(20, Precision.INT4),) * 2)
    assert "no multiple of 4 bytes" in fault((Vector(15, Precision.BF16),) * 2)
