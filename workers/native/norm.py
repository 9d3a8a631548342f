"""Norms of the native library: prepared calls. They know no model and no batch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.native.calls import Call, Calls

_NOTHING = torch.empty(0)
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Norm(ctypes.Structure):
    """TgNorm of norm.cpp."""

    _fields_ = (
        ("x", _POINTER),
        ("rows", _SIZE),
        ("count", _SIZE),
        ("weight", _POINTER),
        ("out", _POINTER),
        ("eps", _FLOAT),
    )


class _NormOnto(ctypes.Structure):
    """TgNormOnto of norm.cpp."""

    _fields_ = (
        ("x", _POINTER),
        ("rows", _SIZE),
        ("count", _SIZE),
        ("weight", _POINTER),
        ("stream", _POINTER),
        ("eps", _FLOAT),
    )


class _HeadNorm(ctypes.Structure):
    """TgHeadNorm of norm.cpp."""

    _fields_ = (
        ("x", _POINTER),
        ("stride", _SIZE),
        ("rows", _SIZE),
        ("heads", _SIZE),
        ("count", _SIZE),
        ("weight", _POINTER),
        ("eps", _FLOAT),
    )


class NativeNorm:
    """RMSNorm of the residual stream: x / sqrt(mean(x²) + eps) * weight. arXiv 1910.07467."""

    def __init__(self, calls: Calls, weight: Tensor, eps: float, slot: str) -> None:
        if weight.dim() != 1 or not weight.numel():
            raise ValueError(f"a norm's weight must be [d], got {list(weight.shape)}")
        self._weight = weight.float().contiguous()
        self._size = weight.numel()
        self._norm = _Norm(count=self._size, weight=self._weight.data_ptr(), eps=eps)
        self._run = Call(calls, "tg_norm", self._norm)
        self._take = calls.workspace.take
        self._slot = slot
        self._x = self._out = _NOTHING

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [T, d], contiguous → bf16 [T, d] in the slot."""
        if x is not self._x:
            self._bind(x)
        self._run()
        return self._out

    def _bind(self, x: Tensor) -> None:
        """Prepare the call for `x`."""
        rows, columns = x.shape
        if x.dtype is not torch.float32 or columns != self._size or not x.is_contiguous() or not rows:
            raise ValueError(f"a norm takes fp32 [T, {self._size}], contiguous, got {x.dtype} {list(x.shape)}")
        self._x, call = _NOTHING, self._norm
        call.x, call.rows = x.data_ptr(), rows
        self._out = self._take(self._slot, rows, columns, torch.bfloat16)
        call.out = self._out.data_ptr()
        self._x = x


class NativeNormOnto:
    """stream + RMSNorm(x)."""

    def __init__(self, calls: Calls, weight: Tensor, eps: float) -> None:
        if weight.dim() != 1 or not weight.numel():
            raise ValueError(f"a norm's weight must be [d], got {list(weight.shape)}")
        self._weight = weight.float().contiguous()
        self._size = weight.numel()
        self._norm = _NormOnto(count=self._size, weight=self._weight.data_ptr(), eps=eps)
        self._run = Call(calls, "tg_norm_onto", self._norm)

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """Both fp32 [T, d], contiguous → the latter, changed in place."""
        for part in (x, stream):
            if part.dtype is not torch.float32 or part.shape != (len(x), self._size) or not part.is_contiguous():
                raise ValueError(
                    f"a norm is added as fp32 [T, {self._size}], contiguous, got {part.dtype} {list(part.shape)}"
                )
        call = self._norm
        call.x, call.rows, call.stream = x.data_ptr(), len(x), stream.data_ptr()
        self._run()
        return stream


class NativeHeadNorm:
    """RMSNorm of every head by itself, in place; weight [heads, head_dim]."""

    def __init__(self, calls: Calls, weight: Tensor, eps: float) -> None:
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(f"a head norm's weight must be [heads, head_dim], got {list(weight.shape)}")
        self._weight = weight.float().contiguous()
        self._heads, self._dim = weight.shape
        self._norm = _HeadNorm(heads=self._heads, count=self._dim, weight=self._weight.data_ptr(), eps=eps)
        self._run = Call(calls, "tg_head_norm", self._norm)

    def __call__(self, x: Tensor) -> None:
        """The first heads * head_dim columns of bf16 [T, ≥ heads * head_dim], rows contiguous."""
        rows, columns = x.shape
        stride, step = x.stride()
        if x.dtype is not torch.bfloat16 or columns < self._heads * self._dim or step != 1:
            raise ValueError(
                f"a head norm takes bf16 [T, ≥ {self._heads * self._dim}] with contiguous rows, got {x.dtype}"
                f" {list(x.shape)}"
            )
        self._norm.x, self._norm.stride, self._norm.rows = x.data_ptr(), stride, rows
        self._run()
