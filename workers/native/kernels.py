"""NativeKernels: linears, norms and attention of the native library. They know no model and no batch.

Between the parts of a layer lies bf16, the residual stream is fp32 and changed in place, sums are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.attention.backend import AttentionBackend, AttentionRule
from workers.kernels import Activation, Adding, HeadNorm, Linear, Norm, Sampler
from workers.kvpool import KVPool
from workers.models.parts import NormKind
from workers.models.spec import ModelSpec, Unsupported
from workers.native.arena import Arena
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import Library
from workers.native.linear import Finish, NativeLinear
from workers.native.norm import NativeHeadNorm, NativeNorm, NativeNormOnto
from workers.native.packing import PackedWeights
from workers.native.sampling import NativeSampler
from workers.native.workspace import Workspace

ROUTER = "router"
"""The slot of a router's scores, whose linear keeps bf16: its products are exact in fp32, in which they are added."""


class NativeKernels:
    """Over `library`, for one rank: its outputs lie in buffers of its own. `weight_precision` "int8": every linear but
    that of routers has int8 weights and multiplies activations as int8 too. That of logits is a quarter of what this
    costs in quality (KL to fp32 0.009 with it, 0.0065 without, SmolLM2-135M) and a fifth of a small model's weights."""

    dtype = torch.bfloat16
    stream = torch.float32
    in_place = True

    def __init__(self, library: Library, weight_precision: str = "auto") -> None:
        if weight_precision not in ("auto", "int8"):
            raise ValueError(f"weight_precision {weight_precision!r} is not supported; known: auto, int8")
        self._int8 = weight_precision == "int8"
        self.name = f"native-{library.variant}" + ("-int8" if self._int8 else "")
        self._library = library
        self._calls = Calls(library, Workspace())
        self.replay = self._calls.replay
        self._arena = Arena(exact=library.debug)

    def linear(self, weight: Tensor, bias: Tensor | None, *, slot: str, wide: bool = False) -> Linear:
        """See Kernels.linear."""
        return self._packed((weight,), (bias,), Finish.WIDE if wide else Finish.NARROW, slot)

    def gated(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, activation: Activation, *, slot: str
    ) -> Linear:
        """See Kernels.gated."""
        return self._packed((gate, up), biases or (None, None), Finish.of(activation), slot)

    def activated(self, weight: Tensor, bias: Tensor | None, activation: Activation, *, slot: str) -> Linear:
        """Raises Unsupported."""
        raise Unsupported("native kernels have no MLP without a gate")

    def router(self, weight: Tensor) -> Linear:
        """See Kernels.router."""
        return self._packed((weight,), (None,), Finish.WIDE, ROUTER)

    def adding(self, weight: Tensor, bias: Tensor | None) -> Adding:
        """See Kernels.adding."""
        return self._packed((weight,), (bias,), Finish.ADD, "").add

    def norm(self, weight: Tensor, eps: float, *, slot: str) -> Norm:
        """See Kernels.norm."""
        return NativeNorm(self._calls, weight, eps, slot)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float, *, slot: str) -> Norm:
        """Raises Unsupported."""
        raise Unsupported("native kernels have no LayerNorm")

    def adding_norm(self, weight: Tensor, eps: float) -> Adding:
        """See Kernels.adding_norm."""
        return NativeNormOnto(self._calls, weight, eps)

    def head_norm(self, weight: Tensor, eps: float) -> HeadNorm:
        """See Kernels.head_norm."""
        return NativeHeadNorm(self._calls, weight, eps)

    def attention(self, pool: KVPool, rules: Sequence[AttentionRule]) -> AttentionBackend:
        """See Kernels.attention."""
        return NativeAttention(self._calls, pool, rules)

    def sampler(self) -> Sampler:
        """See Kernels.sampler."""
        return NativeSampler(self._library)

    def _packed(
        self, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], finish: Finish, slot: str
    ) -> NativeLinear:
        int8 = self._int8 and slot != ROUTER
        packed = PackedWeights.of(self._library, self._arena, weights, biases, int8=int8)
        return NativeLinear(self._calls, packed, finish, slot)


def model_fault(spec: ModelSpec) -> str:
    """Why native kernels cannot compute a model's layers; empty when they can."""
    if spec.norm is NormKind.LAYER:
        return f"they have no LayerNorm, which {spec.architecture} needs"
    if spec.latent:
        return f"they read no joint latents, which {spec.architecture} keeps"
    if not spec.gated:
        return f"they have no MLP without a gate, which {spec.architecture} needs"
    return ""
