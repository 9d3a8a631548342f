"""The parts that models are made of: linear kernels, RMSNorm, rotary embedding. They know no model and no batch.

Rotary pairs lie next to each other here: (0, 1), (2, 3), … instead of (0, d/2), (1, d/2 + 1), …, so that a rotation is
one complex product. `pair_up` brings the rows of a query or key projection into that order; scores do not change, as
queries and keys move alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.models.rope import Rope

Linear = Callable[[Tensor], Tensor]
"""[T, in] → [T, out], both in the kernel's dtype."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """How linears are computed: `name` as status shows it, `dtype` of activations, `packed` for oneDNN's own layout."""

    name: str
    dtype: torch.dtype
    packed: bool

    def build(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The linear of weight [out, in] and bias [out] (any dtype; they are not kept)."""
        shift = None if bias is None else bias.to(self.dtype)
        if not self.packed:
            kept = weight.to(self.dtype).contiguous()
            return lambda x: linear(x, kept, shift)
        # The row count is a hint only; from 8 on it gives the layout that is fast for every batch.
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype).contiguous(), 64)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda x: pointwise(x, blocks, shift, "none", [], "")


def choose_kernel(dtype: str, device: torch.device, name: str | None = None) -> LinearKernel:
    """The fastest exact kernel for weights of `dtype` (fp32, bf16, fp16) on `device`, or the one called `name`.

    A CPU without bf16 instructions computes in fp32 with the weights upcast once (torch's bf16 linear is 2-10 times
    slower there from 8 rows on); their values stay those of the 16-bit weights.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    kernels = {f"torch-{label}": LinearKernel(f"torch-{label}", kind, False) for label, kind in DTYPES.items()}
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        kernels["onednn-fp32"] = LinearKernel("onednn-fp32", torch.float32, True)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            kernels["onednn-bf16"] = LinearKernel("onednn-bf16", torch.bfloat16, True)
    if name is not None:
        if name not in kernels:
            raise ValueError(f"linear kernel {name!r} is not available here; known: {', '.join(kernels)}")
        return kernels[name]
    if device.type != "cpu":
        return kernels[f"torch-{dtype}"]
    return kernels.get(f"onednn-{dtype}") or kernels.get("onednn-fp32") or kernels["torch-fp32"]


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in fp32. arXiv 1910.07467."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.float()
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._dtype = dtype
        self._share = 1.0 / weight.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d] in the same dtype."""
        return (self._scaled(x.float()) * self._weight).to(self._dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()


class Rotation:
    """Rotary embedding of `rope` for heads of `head_dim` values.

    A position's angles depend on the position alone, never on the batch or the chunk. For the dynamic kind that is: up
    to the original length the plain frequencies; a position p beyond it turns at the frequencies of a sequence of
    p + 1 tokens. That is what transformers' cache holds after decoding token by token (a whole prompt beyond the
    original length gives all its positions the frequencies of the prompt's length there).
    """

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        self._exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = _frequencies(rope, self._exponents, head_dim).to(device)
        self._exponents = self._exponents.to(device)
        self._growth = head_dim / (head_dim - 2)
        self._length = torch.tensor(rope.attention_factor, dtype=torch.float32, device=device)

    def at(self, positions: Tensor) -> Tensor:
        """Turns at `positions` (int64 [T]): complex64 [T, 1, head_dim / 2]."""
        angles = positions.float()[:, None] * self._frequencies
        if self._rope.kind == "dynamic":
            angles = torch.where((positions < self._rope.original_length)[:, None], angles, self._stretched(positions))
        return torch.polar(self._length.expand_as(angles), angles)[:, None]

    def _stretched(self, positions: Tensor) -> Tensor:
        rope = self._rope
        lengths = (positions + 1).clamp(min=rope.original_length).float()
        bases = rope.theta * (rope.factor * lengths / rope.original_length - (rope.factor - 1)) ** self._growth
        return positions.float()[:, None] * (1.0 / bases[:, None] ** self._exponents)


def rotate(x: Tensor, turns: Tensor) -> None:
    """Rotate x [T, heads, head_dim] in place by `turns` [T, 1, head_dim / 2]; pairs lie next to each other."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def pair_up(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of [heads * head_dim, …] reordered within each head: 0, d/2, 1, d/2 + 1, …"""
    order = torch.arange(head_dim).view(2, -1).t().reshape(-1)
    return tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def _frequencies(rope: Rope, exponents: Tensor, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]."""
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended (Llama 3.1's model card)."""
    turns = rope.original_length * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Blend by how often a pair turns within the original length, arXiv 2309.00071 section 3.2."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)
