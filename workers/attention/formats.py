"""Formats: vectors of the KV cache as bytes, in every precision, with their scales behind them. It knows no pool.

A vector is stored by itself: what one token holds never changes how another is read. Integers and FP8 are symmetric, a
vector's largest magnitude becomes the format's largest number; INT4 has 15 steps from the vector's lowest value to its
highest, two elements to a byte, the even one in the low half. Inf and NaN spoil the vector that they stand in and
no other.

Keys by channel are the exception: `seal` takes those of a whole block, whose tokens share a channel's step and lowest
value; Inf and NaN spoil their channel of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.layout import Precision, Vector

PLAIN = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
"""Stored as they are."""
_SCALED = {
    Precision.INT8: (torch.int8, 127.0),
    Precision.FP8_E4M3: (torch.float8_e4m3fn, 448.0),
    Precision.FP8_E5M2: (torch.float8_e5m2, 57_344.0),
}
"""Type and largest number."""
_STEPS = 15
_ALIGNED = 4
"""Bytes that a scale's place is a multiple of."""


def fault(vectors: tuple[Vector, ...]) -> str:
    """Why vectors that lie behind each other cannot be read as numbers; empty when they can."""
    at = 0
    for vector in vectors:
        elements = vector.precision.bits * vector.elements // 8
        if vector.elements * vector.precision.bits % 8 or (vector.precision.scale_bytes and elements % _ALIGNED):
            least = _ALIGNED * 8 // vector.precision.bits
            return f"{vector.precision.label} needs vectors of a multiple of {least} elements, got {vector.elements}"
        if (at + vector.bytes) % _ALIGNED:
            return f"{vector.elements} elements in {vector.precision.label} are no multiple of {_ALIGNED} bytes"
        at += vector.bytes
    return ""


def encode(vectors: Tensor, precision: Precision) -> Tensor:
    """[..., d] in any float dtype, each vector contiguous → uint8 [..., bytes of a vector]. ValueError for a precision
    whose scales are a block's."""
    if precision.by_channel:
        raise ValueError(f"one vector by itself cannot be kept in {precision.label}: see seal")
    if precision in PLAIN:
        return vectors.to(PLAIN[precision]).view(torch.uint8)
    vectors = vectors.float()
    if precision is Precision.INT4:
        return _encode_int4(vectors)
    dtype, most = _SCALED[precision]
    scales = vectors.abs().amax(-1, keepdim=True) / most
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    # The rounding of scale and quotient may pass the largest number by a hair, which e5m2 would make infinite.
    elements = (vectors * inverse).clamp_(-most, most)
    if dtype == torch.int8:
        elements = elements.round_()
    return torch.cat((elements.to(dtype).view(torch.uint8), scales.view(torch.uint8)), -1)


def decode(stored: Tensor, precision: Precision, out: Tensor) -> Tensor:
    """uint8 [n, bytes of a vector] → `out`, fp32 [n, d]. Rows may be apart, each is contiguous; for fp32 they are read
    where they lie, and `out` is not used."""
    if precision is Precision.FP32:
        return stored.view(torch.float32)
    if precision in PLAIN:
        return out.copy_(stored.view(PLAIN[precision]))
    if precision is Precision.INT4:
        return _decode_int4(stored, out)
    dtype, size = _SCALED[precision][0], out.shape[-1]
    elements, scales = stored[:, :size].view(dtype), stored[:, size:].view(torch.float32)
    if dtype == torch.int8:
        return torch.mul(elements, scales, out=out)
    return out.copy_(elements).mul_(scales)


def seal(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of whole blocks [..., tokens, d] by channel: uint8 [..., tokens, d / 2], and steps and lowest values, bf16
    [..., 2, d]."""
    packed, steps, lowest = _counted(keys.float(), -2)
    return packed, torch.cat((steps, lowest), -2)


def unseal(packed: Tensor, scales: Tensor, of: Tensor, out: Tensor) -> Tensor:
    """Keys as `seal` made them, uint8 [n, d / 2], each with the scales `of` it (int64 [n]) among bf16 [m, 2, d] →
    `out`, fp32 [n, d]."""
    steps, lowest = (part.float().index_select(0, of) for part in scales.unbind(1))
    return _counts(packed, out).mul_(steps).add_(lowest)


def _encode_int4(vectors: Tensor) -> Tensor:
    packed, steps, lowest = _counted(vectors, -1)
    return torch.cat((packed, steps.view(torch.uint8), lowest.view(torch.uint8)), -1)


def _decode_int4(stored: Tensor, out: Tensor) -> Tensor:
    half = out.shape[-1] // 2
    scales = stored[:, half:].view(torch.bfloat16).float()
    return _counts(stored[:, :half], out).mul_(scales[:, :1]).add_(scales[:, 1:])


def _counted(vectors: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Elements [..., d], two to a byte, counted from the lowest value along `dim` as it is stored, in steps as they are
    stored; those steps; those lowest values."""
    lowest = vectors.amin(dim, keepdim=True).bfloat16()
    span = vectors.amax(dim, keepdim=True) - lowest.float()
    steps = (span / _STEPS).bfloat16()
    inverse = torch.where(steps > 0, 1.0 / steps.float(), 0.0)
    counts = ((vectors - lowest.float()) * inverse).round_().clamp_(0, _STEPS).to(torch.uint8)
    return counts[..., 0::2] | counts[..., 1::2] << 4, steps, lowest


def _counts(packed: Tensor, out: Tensor) -> Tensor:
    """Two elements of each byte, uint8 [n, d / 2] → `out`, fp32 [n, d]."""
    out[:, 0::2] = (packed & 15).float()
    out[:, 1::2] = (packed >> 4).float()
    return out
