"""Kernels: what a model needs of whoever computes its parts, linears and norms, on one device. It knows no model.

A model builds its parts once, while it loads, and calls them in every step. Where two implementations differ is which
formats pass between the parts and whether a part works in place; a model is written against this page alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from workers.attention.backend import AttentionBackend, AttentionRule
from workers.kvpool import KVPool
from workers.plan import Draw

Linear = Callable[[Tensor], Tensor]
"""[T, in] → [T, out], rows contiguous."""
Adding = Callable[[Tensor, Tensor], Tensor]
"""x [T, in] and the residual stream [T, out] → the stream with x's product added. The stream handed in is used up: it
may be the one that comes back, changed."""
Norm = Callable[[Tensor], Tensor]
"""[T, d] of the residual stream → [T, d] in the kernels' dtype."""
Sampler = Callable[[Tensor, Sequence[Draw]], tuple[int, ...]]
"""Logits fp32 [S, vocab] and S draws → S token ids, as workers.sampler says."""
HeadNorm = Callable[[Tensor], None]
"""Normalises each head's vector in place: the first columns of [T, ≥ heads * head_dim], the others left alone."""


class Activation(Enum):
    """What an MLP does to its inside, or to the gate of it. GELU_TANH is the tanh approximation (arXiv 1606.08415)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


class Kernels(Protocol):
    """How linears and norms are computed: `name` as status shows it, `dtype` of what passes between the parts of a
    layer, `stream` of the residual stream.

    Weights are [out, in], biases [out], in any float dtype; they are packed or converted, not kept. A part's output
    lives in a buffer that all parts of the same `slot` share: it holds until one of them is called again.
    `in_place` says that attention reads the pool where it lies, without gathering it first.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def stream(self) -> torch.dtype: ...
    @property
    def in_place(self) -> bool: ...

    def linear(self, weight: Tensor, bias: Tensor | None, *, slot: str, wide: bool = False) -> Linear:
        """x @ weight.T + bias, in `dtype`, or in fp32 when `wide`."""
        ...

    def gated(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: Activation, *, slot: str
    ) -> Linear:
        """activation(x @ gate.T) * (x @ up.T); biases are those of gate and up."""
        ...

    def activated(self, weight: Tensor, bias: Tensor | None, activation: Activation, *, slot: str) -> Linear:
        """activation(x @ weight.T + bias)."""
        ...

    def router(self, weight: Tensor) -> Linear:
        """x @ weight.T computed in fp32, where a small error would lead elsewhere."""
        ...

    def adding(self, weight: Tensor, bias: Tensor | None) -> Adding:
        """stream + x @ weight.T + bias."""
        ...

    def norm(self, weight: Tensor, eps: float, *, slot: str) -> Norm:
        """RMSNorm: x / sqrt(mean(x²) + eps) * weight, computed in fp32 (arXiv 1910.07467)."""
        ...

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float, *, slot: str) -> Norm:
        """LayerNorm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, computed in fp32 (arXiv 1607.06450)."""
        ...

    def adding_norm(self, weight: Tensor, eps: float) -> Adding:
        """stream + RMSNorm(x), for x fp32 [T, d]."""
        ...

    def head_norm(self, weight: Tensor, eps: float) -> HeadNorm:
        """RMSNorm of every head by itself; weight [heads, head_dim]."""
        ...

    def attention(self, pool: KVPool, rules: Sequence[AttentionRule]) -> AttentionBackend:
        """The backend over `pool`, one rule per layer."""
        ...

    def replay(self, owner: object, parts: tuple[object, ...], work: Callable[[], Tensor]) -> Tensor:
        """What `work` gives. It calls nothing but parts of these kernels and of `owner`, an attention backend of
        theirs, on `parts` and what comes of them; so it may be recorded and, for the very same owner and parts,
        replayed without being called."""
        ...

    def sampler(self) -> Sampler:
        """What draws tokens."""
        ...
