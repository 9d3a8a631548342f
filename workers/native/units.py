"""Units: a step's rows as the attention kernel takes them, cut into pieces of work that threads share out.

It knows rows and block tables, neither heads' values nor formats.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.layout import HALVES
from workers.batch import Batch
from workers.kvpool import KVPool
from workers.native.calls import Calls

_UNIT_BYTES = 36
_TOO_SMALL = 1


class _Work(ctypes.Structure):
    """tg_attention of workers/native/attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("q_heads", "kv_heads", "head_dim", "block_size", "blocks")),
        ("window", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("tokens", "row_count", "table_count")),
        *((name, ctypes.c_void_p) for name in ("rows", "tables")),
        ("opened", ctypes.c_void_p * HALVES),
        *((name, ctypes.c_void_p) for name in ("units", "partials", "pending", "scratch")),
        *((name, ctypes.c_int64) for name in ("unit_room", "partial_room", "scratch_room")),
        *((name, ctypes.c_int64) for name in ("unit_count", "partial_count", "scratch_count")),
        ("merge_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cost", ctypes.c_int64),
    )


class Units:
    """A step's rows with the tables of one layer group, cut into units of work for one window; kept in memory that
    grows to what the kernel asks for. Where layers of the group keep keys by channel, the tables of their open blocks
    go with it."""

    def __init__(self, calls: Calls, pool: KVPool, group: int, window: int | None) -> None:
        self._group = group
        self._halves = max(halves for one, halves in zip(pool.group_of, pool.open_groups, strict=True) if one == group)
        self._plan = calls.library.function("tg_attention_plan", ctypes.c_void_p)
        self._slack = 1 if calls.library.debug else 2  # exact where bounds are checked
        self.work = _Work(
            kv_heads=pool.heads,
            head_dim=pool.head_dim,
            block_size=pool.block_size,
            blocks=pool.blocks,
            window=window or 0,
        )
        self.address = ctypes.addressof(self.work)
        self._rows = array("i")
        self._tables = np.empty(0, np.int32)
        self._opened: list[NDArray[np.int32]] = []
        self._room: list[Tensor] = []

    def take(self, batch: Batch) -> None:
        """The rows of `batch`."""
        work, tables = self.work, [span.tables[self._group] for span in batch.spans]
        begins = list(accumulate(map(len, tables), initial=0))
        self._tables = np.fromiter(chain.from_iterable(tables), np.int32, begins[-1])
        if self._halves:
            self._opened = [_joined(batch, half, begins) for half in self._halves]
            work.opened = (ctypes.c_void_p * HALVES)(*(blocks.ctypes.data for blocks in self._opened))
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


def _joined(batch: Batch, group: int, begins: Sequence[int]) -> NDArray[np.int32]:
    """The tables of `group`, which begin where others do. ValueError for one of another length."""
    tables = [span.tables[group] for span in batch.spans]
    if list(accumulate(map(len, tables), initial=0)) != list(begins):
        raise ValueError("a row's tables do not have the same number of blocks")
    return np.fromiter(chain.from_iterable(tables), np.int32, begins[-1])
