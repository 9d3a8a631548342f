"""Rotary embedding: the angles of each position, and the order of pairs that makes a rotation one complex product.

Rotary pairs lie next to each other here: (0, 1), (2, 3), … instead of (0, d/2), (1, d/2 + 1), …, so that a rotation is
one complex product. `pair_up` brings the rows of a query or key projection into that order; scores do not change, as
queries and keys move alike. It knows no model and no batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.models.rope import Rope


class Rotation:
    """Rotary embedding of `rope` for heads of `head_dim` values.

    A position's angles depend on the position alone, never on the batch or the chunk. For the dynamic kind that is: up
    to the original length the plain frequencies; a position p beyond it turns at the frequencies of a sequence of
    p + 1 tokens. That is what transformers' cache holds after decoding token by token (a whole prompt beyond the
    original length gives all its positions the frequencies of the prompt's length there).
    """

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._rope = rope
        size = rope.rotated(head_dim)
        self._exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        self._frequencies = _frequencies(rope, self._exponents, size).to(device)
        self._exponents = self._exponents.to(device)
        self._growth = size / max(1, size - 2)
        self._length = torch.tensor(rope.attention_factor, dtype=torch.float32, device=device)
        self._still = (head_dim - size) // 2

    def at(self, positions: Tensor) -> Tensor:
        """Turns at `positions` (int64 [T]): complex64 [T, 1, head_dim / 2]."""
        angles = positions.float()[:, None] * self._frequencies
        if self._rope.kind == "dynamic":
            angles = torch.where((positions < self._rope.original_length)[:, None], angles, self._stretched(positions))
        turns = torch.polar(self._length.expand_as(angles), angles)
        return (pad(turns, (0, self._still), value=1.0) if self._still else turns)[:, None]

    def _stretched(self, positions: Tensor) -> Tensor:
        rope = self._rope
        lengths = (positions + 1).clamp(min=rope.original_length).double()
        stretch = rope.factor * lengths / rope.original_length - (rope.factor - 1)
        # By logarithms, as torch's power of a long and of a short tensor differ in the last bits.
        bases = math.log(rope.theta) + self._growth * stretch.log()
        return positions.float()[:, None] * torch.exp(-bases[:, None] * self._exponents).float()


def rotate(x: Tensor, turns: Tensor) -> None:
    """Rotate x [T, heads, head_dim] in place by `turns` [T, 1, head_dim / 2]; pairs lie next to each other."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def pair_up(tensor: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Rows of [heads * head_dim, …] reordered within each head, of which the first d = `rotated` turn (None: all of
    it): 0, d/2, 1, d/2 + 1, …; the rest stays where it is."""
    order = torch.arange(head_dim)
    size = head_dim if rotated is None else rotated
    order[:size] = order[:size].view(2, -1).t().reshape(-1)
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
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents)
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
