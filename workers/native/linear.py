"""Linears of the native library: calls prepared over packed weights. They know no model and no batch."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from workers.kernels import Activation
from workers.native.calls import Call, Calls
from workers.native.packing import PackedWeights

_NOTHING = torch.empty(0)
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Finish(IntEnum):
    """What becomes of a product; see linear.h."""

    NARROW = 0
    WIDE = 1
    ADD = 2
    SILU = 3
    GELU_TANH = 4
    GELU = 5

    @classmethod
    def of(cls, activation: Activation) -> Finish:
        return cls[activation.name]


class _Part(ctypes.Structure):
    """TgLinear of linear.h."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("scale", _POINTER),
        ("inputs", _SIZE),
        ("outputs", _SIZE),
        ("width", _INT),
        ("finish", _INT),
    )


class _Product(ctypes.Structure):
    """TgProduct of linear.h."""

    _fields_ = (
        ("part", _POINTER),
        ("x", _POINTER),
        ("x_stride", _SIZE),
        ("rows", _SIZE),
        ("out", _POINTER),
        ("out_stride", _SIZE),
        ("scratch", _POINTER),
    )


class NativeLinear:
    """One product with what follows it: of one matrix, or of two (gate, up) for a gated finish."""

    def __init__(self, calls: Calls, packed: PackedWeights, finish: Finish, slot: str) -> None:
        self._packed = packed  # the addresses below are its
        self._inputs, self._outputs = packed.inputs, packed.outputs
        self._part = _Part(
            packed.tiles.data_ptr(),
            None if packed.bias is None else packed.bias.data_ptr(),
            None if packed.scale is None else packed.scale.data_ptr(),
            packed.inputs,
            packed.outputs,
            packed.width,
            finish,
        )
        self._product = _Product(ctypes.addressof(self._part), out_stride=packed.outputs)
        name = "tg_linear" if packed.scale is None else "tg_linear_int8"
        self._run = Call(calls, name, self._product)
        self._scratch_bytes = calls.library.function(f"{name}_scratch", _SIZE)(packed.inputs)
        self._take = calls.workspace.take
        self._slot = slot
        self._dtype = torch.float32 if finish is Finish.WIDE else torch.bfloat16
        self._adds = finish is Finish.ADD
        self._x = self._out = self._scratch = _NOTHING

    def __call__(self, x: Tensor) -> Tensor:
        """bf16 [T, in], rows contiguous → [T, out] in the slot: fp32 for WIDE, else bf16."""
        if x is not self._x:
            self._bind(x)
        self._run()
        return self._out

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """bf16 [T, in] and fp32 [T, out], contiguous → the latter, with the product added in place."""
        if x is not self._x:
            self._bind(x)
        if stream is not self._out:
            self._bind_stream(stream)
        self._run()
        return stream

    def _bind(self, x: Tensor) -> None:
        """Prepare the call for `x`. A step mostly hands over the very tensors of the step before."""
        rows, columns = x.shape
        stride, step = x.stride()
        if x.dtype is not torch.bfloat16 or columns != self._inputs or (step != 1 and columns > 1) or not rows:
            raise ValueError(
                f"a linear takes bf16 [T, {self._inputs}] with contiguous rows, got {x.dtype} {list(x.shape)}"
                f" with strides {list(x.stride())}"
            )
        call = self._product
        self._x = self._out = _NOTHING
        call.x, call.x_stride, call.rows = x.data_ptr(), stride, rows
        if self._scratch_bytes:
            self._scratch = self._take("scratch", rows, self._scratch_bytes, torch.uint8)
            call.scratch = self._scratch.data_ptr()
        if not self._adds:
            self._out = self._take(self._slot, rows, self._outputs, self._dtype)
            call.out = self._out.data_ptr()
            if call.out == call.x:
                raise ValueError(f"input and output share the slot {self._slot!r}")
        self._x = x

    def _bind_stream(self, stream: Tensor) -> None:
        wanted = (self._product.rows, self._outputs)
        if stream.dtype is not torch.float32 or stream.shape != wanted or not stream.is_contiguous():
            raise ValueError(
                f"the stream must be fp32 {list(wanted)}, contiguous, got {stream.dtype} {list(stream.shape)}"
            )
        self._product.out = stream.data_ptr()
        self._out = stream
