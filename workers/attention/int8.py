"""int8 vectors of the KV cache: one fp32 scale per (token, head) vector, which follows its elements. It knows no pool.

Symmetric: a vector's largest magnitude becomes 127, its scale is that magnitude over 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 4
"""int8 elements that a scale takes."""


def quantise(vectors: Tensor) -> Tensor:
    """fp32 [..., d] → int8 [..., d + SCALE]."""
    scales = vectors.abs().amax(-1, keepdim=True) / 127.0
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    elements = (vectors * inverse).round_().to(torch.int8)
    return torch.cat((elements, scales.view(torch.int8)), -1)


def dequantise(stored: Tensor, out: Tensor) -> Tensor:
    """int8 [n, d + SCALE], contiguous and d a multiple of SCALE → `out`, fp32 [n, d]."""
    size = out.shape[-1]
    return torch.mul(stored[:, :size], stored[:, size:].view(torch.float32), out=out)
