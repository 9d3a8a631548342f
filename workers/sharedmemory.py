"""SharedChannel: collectives between ranks of one machine through a segment of memory, by the native library. It knows
tensors and bytes, not plans. The protocol is in native/turns.h.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_void_p
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from workers.native.library import Library
from workers.segment import NotShared, Segment, Watch

SLOT = 256 * 1024
"""Bytes that a rank hands over at a time, of which it has two: it stays in the second-level cache."""
SPINS = 1000
"""Looks, some twenty nanoseconds each, before a waiting rank sleeps: about what being woken costs. None where threads
outnumber the cores: the one that is waited for needs the core."""
_PATIENCE_S = 60.0
"""How long ranks wait for each other at the least while they meet."""
_ALIGNED = 64
_RANK = (1 << 12) - 1
_HUNG_UP, _TIMED_OUT, _GONE = 1, 2, 3


class _Member(ctypes.Structure):
    """struct tg_member of native/turns.h."""

    _fields_ = (
        ("segment", c_void_p),
        ("peers", POINTER(c_int32)),
        ("slot", c_int64),
        ("timeout_ns", c_int64),
        ("spins", c_int32),
        ("rank", c_int32),
        ("world", c_int32),
    )


class SharedChannel:
    """Rank `rank` over `segment`; `watches` tell, per rank, whether its process has ended. A collective that fails
    raises RuntimeError on every rank: one is gone, or was not there for `timeout_s`, or has hung up.
    """

    def __init__(
        self,
        library: Library,
        segment: Segment,
        rank: int,
        watches: Sequence[Watch],
        *,
        timeout_s: float,
        slot: int = SLOT,
    ) -> None:
        world = len(watches)
        if world < 2 or slot < _ALIGNED or slot % _ALIGNED or segment.size != segment_bytes(library, world, slot):
            raise ValueError(f"a segment of {segment.size} bytes has no slots of {slot} bytes for {world} ranks")
        self._segment = segment
        self._watches = tuple(watches)
        self._peers = (c_int32 * world)(*(watch.descriptor for watch in watches))
        self._view = (c_char * segment.size).from_buffer(segment.memory)
        cores = len(os.sched_getaffinity(0))
        spins = SPINS if world * library.threads <= cores else 0
        self._member = _Member(
            ctypes.addressof(self._view),
            self._peers,
            slot,
            int(timeout_s * 1e9),
            spins,
            rank,
            world,
        )
        self._me = ctypes.pointer(self._member)
        self._rank = rank
        self._gathered = torch.empty(0)
        self._part: Tensor | None = None
        self._stream: Tensor | None = None
        self._places = (0, 0, 0)
        me = POINTER(_Member)
        self._sum = library.function("tg_sum", me, c_void_p, c_int64)
        self._sum_onto = library.function("tg_sum_onto", me, c_void_p, c_void_p, c_int64)
        self._least = library.function("tg_least", me, POINTER(c_int64))
        self._send = library.function("tg_send", me, c_char_p, c_int64)
        self._await = library.function("tg_await", me, POINTER(c_int64))
        self._receive = library.function("tg_receive", me, c_void_p, c_int64)
        self._gather = library.function("tg_gather", me, c_void_p, c_int64, POINTER(c_int64 * world), c_void_p)
        self._hang_up = library.function("tg_hang_up", me)
        self._widths = c_int64 * world
        self._number = c_int64()

    def sum(self, tensor: Tensor) -> None:
        """fp32 `tensor`, contiguous, becomes the sum over ranks, added in rank order."""
        _check(tensor)
        self._raise(self._sum(self._me, tensor.data_ptr(), tensor.numel()))

    def sum_onto(self, part: Tensor, stream: Tensor) -> Tensor:
        """`stream`, in place where it is fp32, plus the sum of `part` over ranks."""
        if stream.dtype != torch.float32:
            self.sum(part)
            return stream + part.to(stream.dtype)
        # A step mostly hands over the very tensors of the step before.
        if part is not self._part or stream is not self._stream:
            self._bind(part, stream)
        self._raise(self._sum_onto(self._me, *self._places))
        return stream

    def least(self, value: int) -> int:
        """The least `value` of all ranks."""
        self._number.value = value
        self._raise(self._least(self._me, self._number))
        return self._number.value

    def send(self, message: bytes) -> None:
        """Rank 0: `message` to all others."""
        self._raise(self._send(self._me, message, len(message)))

    def receive(self) -> bytes:
        """The others: rank 0's next message."""
        self._raise(self._await(self._me, self._number))
        message = bytearray(self._number.value)
        target = (c_char * len(message)).from_buffer(message)
        self._raise(self._receive(self._me, ctypes.addressof(target), len(message)))
        return bytes(message)

    def gather(self, local: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: [S, sum(widths)] from each rank's fp32 `local` [S, widths[rank]], in rank order, until the next call;
        None elsewhere."""
        _check(local)
        rows = len(local)
        if local.dim() != 2 or local.shape[1] != widths[self._rank] or len(widths) != len(self._peers):
            raise ValueError(f"rank {self._rank} has {list(local.shape)} of widths {list(widths)}")
        width = sum(widths)
        total = rows * width
        if self._rank == 0 and len(self._gathered) < total:
            self._gathered = torch.empty(total)
        target = self._gathered.data_ptr() if self._rank == 0 else None
        self._raise(self._gather(self._me, local.data_ptr(), rows, self._widths(*widths), target))
        return self._gathered[:total].view(rows, width) if self._rank == 0 else None

    def close(self) -> None:
        """Hang up: whoever waits in a collective, in whatever thread, fails at once. The memory stays mapped until
        nobody holds this object."""
        self._hang_up(self._me)

    def _bind(self, part: Tensor, stream: Tensor) -> None:
        self._part = self._stream = None
        _check(part)
        _check(stream)
        if part.shape != stream.shape:
            raise ValueError(f"part is {list(part.shape)}, stream {list(stream.shape)}")
        self._places = (part.data_ptr(), stream.data_ptr(), part.numel())
        self._part, self._stream = part, stream

    def _raise(self, code: int) -> None:
        if not code:
            return
        kind, rank = code >> 12, code & _RANK
        if kind == _GONE:
            raise RuntimeError(f"the process of rank {rank} has ended")
        if kind == _TIMED_OUT:
            raise RuntimeError(f"rank {rank} has not come to a collective for {self._member.timeout_ns / 1e9:g} s")
        if kind == _HUNG_UP:
            raise RuntimeError("a rank of the group has hung up")
        raise RuntimeError(f"a collective failed with code {code}")


def segment_bytes(library: Library, world: int, slot: int) -> int:
    """What a segment for `world` ranks takes."""
    size = c_int64()
    library.function("tg_segment_bytes", c_int, c_int64, POINTER(c_int64))(world, slot, size)
    return size.value


def meet(library: Library, store: Store, rank: int, world: int, *, timeout_s: float, slot: int = SLOT) -> SharedChannel:
    """The channel of `rank`, made by rank 0 and found by the others through `store`. Raises NotShared, on every rank,
    when one of them cannot have it, and RuntimeError when a rank is gone already."""
    segment, obstacle = None, ""
    try:
        Watch(os.getpid())
        segment = _segment(library, store, rank, world, slot, timeout_s)
    except NotShared as refusal:
        obstacle = f"rank {rank}: {refusal}"
        if rank == 0:
            store.set("segment", b"{}")
    store.set(f"joined/{rank}", json.dumps([os.getpid(), obstacle]))
    answers = [json.loads(_told(store, f"joined/{other}", timeout_s)) for other in range(world)]
    if segment:
        segment.let_go()
    obstacles = [refusal for _, refusal in answers if refusal]
    if obstacles or segment is None:
        raise NotShared(obstacles[0])
    try:
        watches = [Watch(pid) for pid, _ in answers]
    except ProcessLookupError as error:
        raise RuntimeError("a rank ended while the group was built") from error
    return SharedChannel(library, segment, rank, watches, timeout_s=timeout_s, slot=slot)


def decline(store: Store, rank: int, why: str) -> None:
    """What a rank without the library says instead of `meet`: the others must not wait for it."""
    if rank == 0:
        store.set("segment", b"{}")
    store.set(f"joined/{rank}", json.dumps([os.getpid(), f"rank {rank}: {why}"]))


def _segment(library: Library, store: Store, rank: int, world: int, slot: int, timeout_s: float) -> Segment:
    if rank == 0:
        made = Segment.make(segment_bytes(library, world, slot))
        store.set("segment", made.invitation())
        return made
    invitation = _told(store, "segment", timeout_s)
    if invitation == b"{}":
        raise NotShared("rank 0 has none to offer")
    return Segment.join(invitation)


def _told(store: Store, key: str, timeout_s: float) -> bytes:
    """What another rank says under `key`. It may take its time: it may have to compile the library first."""
    store.wait([key], timedelta(seconds=max(timeout_s, _PATIENCE_S)))
    told: bytes = store.get(key)
    return told


def _check(tensor: Tensor) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"collectives take contiguous fp32 on a CPU, not {tensor.dtype} on {tensor.device}")
