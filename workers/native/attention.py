"""NativeAttention: the C++ kernel over the paged pool, for one-token rows, prefill chunks and both in one step.

It has a page format of its own (workers/native/attention_page.h): a pool that it serves is read by no other backend.
What it computes for a token depends on that token's row alone, to the bit: not on its neighbours, on how a prompt is
cut into chunks, on what the cache held, or on the number of threads. It knows no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.attention.backend import AttentionRule
from workers.batch import Batch
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.native.calls import Call, Calls
from workers.native.library import NativeUnavailable
from workers.native.pairs import layout_fault, part_of
from workers.native.units import Units


class _Layer(ctypes.Structure):
    """Layer of workers/native/attention_layer.h, field by field."""

    _fields_ = (
        ("work", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
        ("page", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("heads", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class NativeAttention:
    """The backend over `pool` for bf16 heads of pool.head_dim, one rule per layer.

    Raises Unsupported for a pool on another device or with pages that `layout_fault` objects to, and for a part of the
    library that cannot be had.
    """

    name = "native"

    def __init__(self, calls: Calls, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        _check_pool(pool)
        self._pool = pool
        self._calls = calls
        self._units: dict[tuple[int, int | None], Units] = {}
        self._sinks = [None if rule.sinks is None else rule.sinks.float().contiguous() for rule in rules]
        self._layers = [self._layer_of(layer, rule) for layer, rule in enumerate(rules)]
        self._layer = _Layer()
        self._attend = Call(calls, "tg_attention", self._layer)
        self._tokens = 0
        self._width = 0
        self._columns = 0

    def prepare(self, batch: Batch) -> object:
        """Hand the step's rows to the kernel; holds until the next call. Raises ValueError for rows whose blocks do not
        cover them or are not the pool's."""
        self._tokens = 0  # nothing is attended for, until all is cut
        for units in self._units.values():
            units.take(batch)
            if self._width:
                units.cut()
        self._tokens = len(batch.positions)
        return self

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """See AttentionBackend.attend; `heads` is bf16, rows contiguous. Raises ValueError for what does not fit."""
        if step is not self:
            raise ValueError("attend wants what prepare of the same backend returned")
        tokens = self._tokens
        if heads.shape[1] != self._width:
            self._shape(heads)
        if heads.shape[0] != tokens or heads.dtype != torch.bfloat16 or heads.stride(1) != 1:
            raise ValueError(f"heads must be bf16 [{tokens}, …] with contiguous rows, got {_described(heads)}")
        place = None
        if turns is not None:
            fits = turns.numel() * 2 == tokens * self._pool.head_dim
            if not fits or turns.dtype != torch.complex64 or not turns.is_contiguous():
                raise ValueError(f"turns must be complex64 and contiguous for {tokens} tokens, got {_described(turns)}")
            place = turns.data_ptr()
        out = self._calls.workspace.take("attended", tokens, self._columns, torch.bfloat16)
        call = self._layer
        ctypes.pointer(call)[0] = self._layers[layer]
        call.heads, call.stride = heads.data_ptr(), heads.stride(0)
        call.turns, call.out = place, out.data_ptr()
        self._attend()
        return out

    def _layer_of(self, layer: int, rule: AttentionRule) -> _Layer:
        """What is the same in every step. Layers of one table and window share what is cut for a step."""
        pool, sinks = self._pool, self._sinks[layer]
        key = (pool.group_of[layer], rule.window)
        if key not in self._units:
            self._units[key] = Units(self._calls, pool, *key)
        try:
            part = self._calls.library.part(part_of(*pool.layout.layers[layer].vectors))
        except NativeUnavailable as error:
            raise Unsupported(f"native attention cannot be used: {error}") from error
        return _Layer(
            work=self._units[key].address,
            cache=ctypes.cast(part.tg_cache, ctypes.c_void_p),
            attend=ctypes.cast(part.tg_attend, ctypes.c_void_p),
            page=pool.pages[layer].data_ptr(),
            page_bytes=pool.pages[layer].stride(0),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=rule.scale,
            soft_cap=rule.softcap or 0.0,
        )

    def _shape(self, heads: Tensor) -> None:
        """Learn the number of query heads from the first heads that come."""
        count, rest = divmod(heads.shape[1], self._pool.head_dim)
        queries = count - 2 * self._pool.heads
        if rest or queries < 1 or queries % self._pool.heads:
            raise ValueError(
                f"heads of {heads.shape[1]} columns are no multiple of {self._pool.heads} KV heads of "
                f"{self._pool.head_dim} values, beside keys and values"
            )
        for sinks in self._sinks:
            if sinks is not None and sinks.shape != (queries,):
                raise ValueError(f"sinks must be [{queries}], one per query head, got {list(sinks.shape)}")
        self._width = heads.shape[1]
        self._columns = queries * self._pool.head_dim
        for units in self._units.values():
            units.work.q_heads = queries
            units.cut()


def _check_pool(pool: KVPool) -> None:
    """Raises Unsupported."""
    if pool.device.type != "cpu":
        raise Unsupported(f"native attention computes on a CPU, not on {pool.device}")
    if fault := layout_fault(pool.layout):
        raise Unsupported(f"native attention cannot be used: {fault}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {list(tensor.stride())}"
