"""NativeAttention: the C++ kernel over the paged pool, for one-token rows, prefill chunks and both in one step.

It has a page format of its own (workers/native/attention_page.h): a pool that it serves is read by no other backend.
What it computes for a token depends on that token's row alone, to the bit: not on its neighbours, on how a prompt is
cut into chunks, on what the cache held, or on the number of threads. It knows no model.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from workers.attention.backend import AttentionRule
from workers.batch import Batch
from workers.kvpool import KVPool
from workers.models.spec import Unsupported
from workers.native.calls import Call, Calls

_FORMATS = {Precision.BF16: 0, Precision.FP16: 1, Precision.INT8: 2}
_TILE = 16
_MOST_DIM = 256
_UNIT_BYTES = 36
_TOO_SMALL = 1


class _Work(ctypes.Structure):
    """tg_attention of workers/native/attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "block_size", "blocks")),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("tokens", "row_count", "table_count")),
        *((name, ctypes.c_void_p) for name in ("rows", "tables", "units", "partials", "pending", "scratch")),
        *((name, ctypes.c_int64) for name in ("unit_room", "partial_room", "scratch_room")),
        *((name, ctypes.c_int64) for name in ("unit_count", "partial_count", "scratch_count")),
        ("merge_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cost", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """Layer of workers/native/attention_layer.h, field by field."""

    _fields_ = (
        ("work", ctypes.c_void_p),
        ("page", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("heads", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class NativeAttention:
    """The backend over `pool` for bf16 heads of pool.head_dim, one rule per layer.

    Raises Unsupported for a pool on another device, with a layer in another precision than one of bf16, fp16 and int8,
    with a block_size or head_dim that is no multiple of 16 (head_dim: up to 256), or for attention sinks.
    """

    name = "native"

    def __init__(self, calls: Calls, pool: KVPool, rules: Sequence[AttentionRule]) -> None:
        _check_pool(pool)
        if any(rule.sinks is not None for rule in rules):
            raise Unsupported("native attention cannot be used: the model has attention sinks")
        self._pool = pool
        self._calls = calls
        layers = zip(pool.pages, pool.layout.layers, strict=True)
        self._pages = [(page.data_ptr(), page.stride(0), _FORMATS[kept.vectors[0].precision]) for page, kept in layers]
        self._cuts: dict[tuple[int, float, float | None], _Cut] = {}
        self._cut_of = [self._cut_for(layer, rule) for layer, rule in enumerate(rules)]
        self._layer = _Layer()
        self._attend = Call(calls, "tg_attention", self._layer)
        self._tokens = 0
        self._width = 0
        self._columns = 0

    def prepare(self, batch: Batch) -> object:
        """Hand the step's rows to the kernel; holds until the next call. Raises ValueError for rows whose blocks do not
        cover them or are not the pool's."""
        self._tokens = 0  # nothing is attended for, until all is cut
        for cut in self._cuts.values():
            cut.take(batch)
            if self._width:
                cut.cut()
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
        call.work = self._cut_of[layer].address
        call.page, call.page_bytes, call.format = self._pages[layer]
        call.heads, call.stride = heads.data_ptr(), heads.stride(0)
        call.turns, call.out = place, out.data_ptr()
        self._attend()
        return out

    def _cut_for(self, layer: int, rule: AttentionRule) -> _Cut:
        """Layers of one group and rule share what is cut for a step."""
        group = self._pool.group_of[layer]
        key = (group, rule.scale, rule.softcap)
        if key not in self._cuts:
            self._cuts[key] = _Cut(self._calls, self._pool, group, rule)
        return self._cuts[key]

    def _shape(self, heads: Tensor) -> None:
        """Learn the number of query heads from the first heads that come."""
        count, rest = divmod(heads.shape[1], self._pool.head_dim)
        queries = count - 2 * self._pool.heads
        if rest or queries < 1 or queries % self._pool.heads:
            raise ValueError(
                f"heads of {heads.shape[1]} columns are no multiple of {self._pool.heads} KV heads of "
                f"{self._pool.head_dim} values, beside keys and values"
            )
        self._width = heads.shape[1]
        self._columns = queries * self._pool.head_dim
        for cut in self._cuts.values():
            cut.work.q_heads = queries
            cut.cut()


class _Cut:
    """A step's rows with the tables of one layer group, cut into units of work; kept in memory that grows to what the
    kernel asks for."""

    def __init__(self, calls: Calls, pool: KVPool, group: int, rule: AttentionRule) -> None:
        self._group = group
        self._plan = calls.library.function("tg_attention_plan", ctypes.c_void_p)
        self._slack = 1 if calls.library.debug else 2  # exact where bounds are checked
        self.work = _Work(
            kv_heads=pool.heads,
            head_dim=pool.head_dim,
            block_size=pool.block_size,
            blocks=pool.blocks,
            window=rule.window or 0,
            scale=rule.scale,
            soft_cap=rule.softcap or 0.0,
        )
        self.address = ctypes.addressof(self.work)
        self._rows = array("i")
        self._tables = np.empty(0, np.int32)
        self._room: list[Tensor] = []

    def take(self, batch: Batch) -> None:
        """The rows of `batch`."""
        work, tables = self.work, [span.tables[self._group] for span in batch.spans]
        begins = list(accumulate(map(len, tables), initial=0))
        self._tables = np.fromiter(chain.from_iterable(tables), np.int32, begins[-1])
        rows = [part for span, begin in zip(batch.spans, begins, strict=False) for part in (*span[:3], begin)]
        self._rows = array("i", rows)
        work.tokens = len(batch.positions)
        work.row_count = len(tables)
        work.table_count = begins[-1]
        work.rows = self._rows.buffer_info()[0]
        work.tables = self._tables.ctypes.data

    def cut(self) -> None:
        """Have the kernel cut the rows. Raises ValueError for rows whose blocks do not cover them or are not the
        pool's."""
        work = self.work
        while (answer := self._plan(self.address)) == _TOO_SMALL:
            units, partials = self._slack * work.unit_count, self._slack * work.partial_count
            sizes = (units * _UNIT_BYTES, partials * 4, (units + 1) * 4, work.scratch_count)
            self._room = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            work.units, work.partials, work.pending, work.scratch = (part.data_ptr() for part in self._room)
            work.unit_room, work.partial_room, work.scratch_room = units, partials, work.scratch_count
        if answer:
            work.tokens = 0  # nothing is attended for
            raise ValueError(f"a row's blocks do not cover it or are not among the pool's {work.blocks}")


def layout_fault(layout: KVLayout) -> str:
    """Why native attention cannot work on pages of `layout`; empty when it can."""
    for layer in layout.layers:
        if layer.joint:
            return "MLA's latents are read by torch alone"
        stored = {vector.precision for vector in layer.vectors}
        if strange := sorted(precision.label for precision in stored - set(_FORMATS)):
            return f"kv_precision {strange[0]} is none of {', '.join(known.label for known in _FORMATS)}"
        if len(stored) > 1:
            return "keys and values of a layer in different precisions"
        dims = {vector.elements for vector in layer.vectors}
        if wrong := [dim for dim in dims if dim % _TILE or dim > _MOST_DIM]:
            return f"heads of {wrong[0]} elements are no multiple of {_TILE} up to {_MOST_DIM}"
    if layout.block_size % _TILE:
        return f"block_size {layout.block_size} is no multiple of {_TILE}"
    return ""


def _check_pool(pool: KVPool) -> None:
    """Raises Unsupported."""
    if pool.device.type != "cpu":
        raise Unsupported(f"native attention computes on a CPU, not on {pool.device}")
    if fault := layout_fault(pool.layout):
        raise Unsupported(f"native attention cannot be used: {fault}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {list(tensor.stride())}"
