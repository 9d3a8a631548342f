"""TorchKernels: linears and norms in plain torch, on any device; on a CPU through oneDNN's packed weights. They know no
model and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, silu

from workers.attention.backend import AttentionBackend, AttentionRule
from workers.attention.latent import LatentAttention
from workers.attention.reference import ReferenceAttention
from workers.kernels import Activation, Adding, HeadNorm, Linear, Norm, Sampler
from workers.kvpool import KVPool
from workers.sampler import sample
from workers.weights import to_dtype


@dataclass(frozen=True, slots=True)
class TorchKernels:
    """`packed` for oneDNN's own layout of weights, on a CPU."""

    name: str
    dtype: torch.dtype
    packed: bool
    in_place = False

    @property
    def stream(self) -> torch.dtype:
        """The residual stream has the dtype of everything else."""
        return self.dtype

    def linear(self, weight: Tensor, bias: Tensor | None, *, slot: str, wide: bool = False) -> Linear:
        """See Kernels.linear."""
        product = self._product(weight, bias)
        return (lambda x: product(x).float()) if wide and self.dtype != torch.float32 else product

    def gated(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: Activation, *, slot: str
    ) -> Linear:
        """See Kernels.gated."""
        both = self._product(torch.cat((gate, up)), torch.cat(biases) if biases else None)

        def apply(x: Tensor) -> Tensor:
            left, right = both(x).chunk(2, -1)
            return _activate(left, activation).mul_(right)

        return apply

    def activated(self, weight: Tensor, bias: Tensor | None, activation: Activation, *, slot: str) -> Linear:
        """See Kernels.activated."""
        product = self._product(weight, bias)
        return lambda x: _activate(product(x), activation)

    def router(self, weight: Tensor) -> Linear:
        """See Kernels.router."""
        kept = to_dtype(weight, torch.float32)
        return lambda x: linear(x.float(), kept)

    def adding(self, weight: Tensor, bias: Tensor | None) -> Adding:
        """See Kernels.adding."""
        product = self._product(weight, bias)
        return lambda x, stream: stream + product(x)

    def norm(self, weight: Tensor, eps: float, *, slot: str) -> Norm:
        """See Kernels.norm."""
        return RMSNorm(weight, eps, self.dtype)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float, *, slot: str) -> Norm:
        """See Kernels.layer_norm."""
        size, scale, shift, dtype = weight.shape, weight.float(), bias.float(), self.dtype
        return lambda x: layer_norm(x.float(), size, scale, shift, eps).to(dtype)

    def adding_norm(self, weight: Tensor, eps: float) -> Adding:
        """See Kernels.adding_norm."""
        norm = RMSNorm(weight, eps, self.dtype)
        return lambda x, stream: stream + norm(x)

    def head_norm(self, weight: Tensor, eps: float) -> HeadNorm:
        """See Kernels.head_norm."""
        norm = RMSNorm(weight, eps, self.dtype)

        def apply(x: Tensor) -> None:
            heads = x[:, : weight.numel()].unflatten(-1, weight.shape)
            heads.copy_(norm(heads))

        return apply

    def attention(self, pool: KVPool, rules: Sequence[AttentionRule]) -> AttentionBackend:
        """See Kernels.attention."""
        return LatentAttention(pool, rules) if pool.joint else ReferenceAttention(pool, rules)

    def replay(self, owner: object, parts: tuple[object, ...], work: Callable[[], Tensor]) -> Tensor:
        """See Kernels.replay."""
        return work()

    def sampler(self) -> Sampler:
        """See Kernels.sampler."""
        return sample

    def _product(self, weight: Tensor, bias: Tensor | None) -> Linear:
        shift = None if bias is None else bias.to(self.dtype)
        if not self.packed:
            kept = to_dtype(weight, self.dtype)
            return lambda x: linear(x, kept, shift)
        # The row count is a hint only; from 8 on it gives the layout that is fast for every batch.
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype).contiguous(), 64)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda x: pointwise(x, blocks, shift, "none", [], "")


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


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return silu(x)
    return gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")
