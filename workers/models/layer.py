"""Layers of a decoder: what a step does in one, as parts that were put together at load time. It knows no weights.

A layer is called with the residual stream and what the step's layers share. Its attention is any part that adds to the
stream what it makes of the normed stream; its MLP is another, which needs nothing of the step. So a mixture of experts
or a joint latent is a part like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workers.attention.backend import AttentionBackend
from workers.kernels import Adding, Linear, Norm


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share: the backend, what it prepared, and for each rope of the model the turns of the
    step's positions, complex64 [T, 1, head_dim / 2], or None where positions are not rotated."""

    attention: AttentionBackend
    prepared: object
    turns: tuple[Tensor | None, ...]


AttentionPart = Callable[[Tensor, Tensor, Step], Tensor]
"""Normed [T, hidden], the stream, the step → the stream, as workers.kernels.Adding says."""
MlpPart = Adding
"""Normed [T, hidden] and the stream → the stream. The stream may be the one that was handed in, changed."""
Layer = Callable[[Tensor, Step], Tensor]
"""The stream [T, hidden] and the step → the stream after the layer."""


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention of layer `layer` with keys and values per head: `heads` makes queries, keys and values side by side,
    turned by the rope of number `rope`; `out` brings what was attended to into the stream."""

    layer: int
    rope: int
    heads: Linear
    out: Adding

    def __call__(self, normed: Tensor, stream: Tensor, step: Step) -> Tensor:
        attended = step.attention.attend(self.layer, self.heads(normed), step.turns[self.rope], step.prepared)
        return self.out(attended, stream)


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One MLP for every token."""

    inner: Linear
    down: Adding

    def __call__(self, normed: Tensor, stream: Tensor) -> Tensor:
        return self.down(self.inner(normed), stream)


@dataclass(frozen=True, slots=True)
class Sequential:
    """Attention, then the MLP on what it left."""

    attention_norm: Norm
    attention: AttentionPart
    mlp_norm: Norm
    mlp: MlpPart

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        stream = self.attention(self.attention_norm(stream), stream, step)
        return self.mlp(self.mlp_norm(stream), stream)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Attention and MLP side by side on the same stream, each through its norm."""

    attention_norm: Norm
    attention: AttentionPart
    mlp_norm: Norm
    mlp: MlpPart

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        attention_input, mlp_input = self.attention_norm(stream), self.mlp_norm(stream)
        return self.mlp(mlp_input, self.attention(attention_input, stream, step))


@dataclass(frozen=True, slots=True)
class Shared:
    """Attention and MLP side by side behind one norm."""

    norm: Norm
    attention: AttentionPart
    mlp: MlpPart

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        normed = self.norm(stream)
        return self.mlp(normed, self.attention(normed, stream, step))
