"""GroupChannel: collectives over a process group of torch, gloo on a CPU or NCCL between GPUs. It knows tensors and
bytes, not plans.

Process groups are built directly from a store, without torch's global default group, so that several ranks may be
threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

_FRAME = 8192
"""Bytes of a message's first piece; what does not fit follows in a second one."""


class GroupChannel:
    """Rank `rank` of the `world` ranks of `group`. A collective that fails raises RuntimeError."""

    def __init__(self, group: Any, rank: int, world: int) -> None:
        self._group = group
        self._rank = rank
        self._world = world

    @classmethod
    def gloo(cls, store: Store, rank: int, world: int, *, host: str, timeout_s: float) -> GroupChannel:
        """Meet the others at `store`; `host` is this rank's own address, the only one it listens on."""
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return cls(ProcessGroupGloo(store, rank, world, options), rank, world)

    @classmethod
    def nccl(cls, store: Store, rank: int, world: int, *, timeout_s: float) -> GroupChannel:
        """Between GPUs. It carries tensors, not messages."""
        from torch.distributed import ProcessGroupNCCL  # a CPU build of torch has none

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return cls(ProcessGroupNCCL(store, rank, world, options), rank, world)

    def sum(self, tensor: Tensor) -> None:
        """`tensor`, contiguous, becomes the sum over ranks."""
        self._group.allreduce([tensor], AllreduceOptions()).wait()

    def sum_onto(self, part: Tensor, stream: Tensor) -> Tensor:
        """`stream` plus the sum of `part` over ranks, in stream's dtype."""
        self.sum(part)
        return stream + part.to(stream.dtype)

    def least(self, value: int) -> int:
        """The least `value` of all ranks."""
        flag = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        self._group.allreduce([flag], options).wait()
        return int(flag.item())

    def send(self, message: bytes) -> None:
        """Rank 0: `message` to all others."""
        frame = bytearray(_FRAME)
        frame[:8] = len(message).to_bytes(8, "little")
        head = message[: _FRAME - 8]
        frame[8 : 8 + len(head)] = head
        self._broadcast(torch.frombuffer(frame, dtype=torch.uint8))
        if len(message) > len(head):
            self._broadcast(torch.frombuffer(bytearray(message[len(head) :]), dtype=torch.uint8))

    def receive(self) -> bytes:
        """The others: rank 0's next message."""
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        content: bytes = frame.numpy().tobytes()
        length = int.from_bytes(content[:8], "little")
        head = content[8 : 8 + length]
        if length == len(head):
            return head
        rest = torch.empty(length - len(head), dtype=torch.uint8)
        self._broadcast(rest)
        return head + bytes(rest.numpy().tobytes())

    def gather(self, local: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: [S, sum(widths)] from each rank's `local` [S, widths[rank]], in rank order; None elsewhere."""
        padded = torch.nn.functional.pad(local, (0, max(widths) - local.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self._world)] if self._rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [padded], options).wait()
        if not parts:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def close(self) -> None:
        """Hang up: peers that wait in a collective fail at once."""
        self._group.shutdown()

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()
