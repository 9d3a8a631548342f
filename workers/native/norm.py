"""Norms of the native library: prepared calls. They know no model and no batch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.native.library import Library
from workers.native.workspace import Workspace

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


class NativeNorm:
    """RMSNorm of the residual stream: x / sqrt(mean(x²) + eps) * weight. arXiv 1910.07467."""

    def __init__(self, library: Library, workspace: Workspace, weight: Tensor, eps: float, slot: str) -> None:
        if weight.dim() != 1 or not weight.numel():
            raise ValueError(f"a norm's weight must be [d], got {list(weight.shape)}")
        self._weight = weight.float().contiguous()
        self._size = weight.numel()
        self._call = _Norm(count=self._size, weight=self._weight.data_ptr(), eps=eps)
        self._address = ctypes.addressof(self._call)
        self._run = library.function("tg_norm", _POINTER)
        self._take = workspace.take
        self._slot = slot
        self._x = self._out = _NOTHING

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [T, d], contiguous → bf16 [T, d] in the slot."""
        if x is not self._x:
            self._bind(x)
        self._run(self._address)
        return self._out

    def _bind(self, x: Tensor) -> None:
        """Prepare the call for `x`."""
        rows, columns = x.shape
        if x.dtype is not torch.float32 or columns != self._size or not x.is_contiguous() or not rows:
            raise ValueError(f"a norm takes fp32 [T, {self._size}], contiguous, got {x.dtype} {list(x.shape)}")
        self._x, call = _NOTHING, self._call
        call.x, call.rows = x.data_ptr(), rows
        self._out = self._take(self._slot, rows, columns, torch.bfloat16)
        call.out = self._out.data_ptr()
        self._x = x


class NativeHeadNorm:
    """RMSNorm of every head by itself, in place; weight [heads, head_dim]."""

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(f"a head norm's weight must be [heads, head_dim], got {list(weight.shape)}")
        self._weight = weight.float().contiguous()
        self._address = self._weight.data_ptr()
        self._heads, self._dim = weight.shape
        self._eps = eps
        self._run = library.function("tg_head_norm", _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _FLOAT)

    def __call__(self, x: Tensor) -> None:
        """The first heads * head_dim columns of bf16 [T, ≥ heads * head_dim], rows contiguous."""
        rows, columns = x.shape
        stride, step = x.stride()
        if x.dtype is not torch.bfloat16 or columns < self._heads * self._dim or step != 1:
            raise ValueError(
                f"a head norm takes bf16 [T, ≥ {self._heads * self._dim}] with contiguous rows, got {x.dtype}"
                f" {list(x.shape)}"
            )
        self._run(x.data_ptr(), stride, rows, self._heads, self._dim, self._address, self._eps)
