"""Communicator: what a rank says to the other ranks of its group. It knows tensors and plans, not models.

Process groups are built directly from a store, without torch's global default group, so that several ranks may be
threads of one process. Plans travel over gloo on the CPU whatever the device; tensors over gloo or NCCL.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from workers.plan import StepPlan

_FRAME = 8192
"""Bytes of a plan's first message; what does not fit follows in a second one."""


def open_store(host: str) -> tuple[Store, str]:
    """Rank 0's meeting point on `host` and its address "host:port". It lives as long as the returned object.

    The socket is bound here, since torch's own store would listen on every interface.
    """
    listener = socket.create_server((host, 0), backlog=128)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def join_store(address: str, timeout_s: float = 60.0) -> Store:
    """A follower's connection to the store at "host:port"; raises when nobody answers within `timeout_s`."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


class Communicator:
    """One rank of `world`. Build it with `alone` or `connect`; with one rank every call is free of traffic.

    A collective that fails (a peer is gone, or `timeout_s` is over) raises RuntimeError; the group is then lost.
    `calls` counts the collectives that this rank has begun, `last` names the latest: ranks that wait for each other
    show by them who is behind.
    """

    def __init__(self, rank: int, world: int, control: Any, data: Any) -> None:
        self.rank = rank
        self.world = world
        self.calls = 0
        self.last = ""
        self._control = control
        self._data = data

    @classmethod
    def alone(cls) -> Communicator:
        """The only rank of its group."""
        return cls(0, 1, None, None)

    @classmethod
    def connect(
        cls, store: Store, rank: int, world: int, *, host: str, device: torch.device, timeout_s: float = 600.0
    ) -> Communicator:
        """Meet the other ranks at `store`; `host` is this rank's own address, the only one it listens on."""
        if world == 1:
            return cls.alone()
        control = _gloo(PrefixStore("control", store), rank, world, host, timeout_s)
        data = control if device.type == "cpu" else _nccl(PrefixStore("data", store), rank, world, timeout_s)
        return cls(rank, world, control, data)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of fp32 `tensor` (contiguous, any shape), in place."""
        if self.world > 1:
            self._begin("all_reduce")
            self._data.allreduce([tensor], AllreduceOptions()).wait()
        return tensor

    def gather_logits(self, local: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: [S, sum(widths)] from each rank's fp32 [S, widths[rank]], in rank order; None elsewhere."""
        if self.world == 1:
            return local
        widest = max(widths)
        padded = torch.nn.functional.pad(local, (0, widest - local.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.world)] if self.rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        self._begin("gather")
        self._data.gather([parts] if parts else [], [padded], options).wait()
        if not parts:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def broadcast_plan(self, plan: StepPlan | None) -> None:
        """Rank 0: send `plan` to all followers; None ends their loops."""
        if self.world == 1:
            return
        content = pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL)
        frame = bytearray(_FRAME)
        frame[:8] = len(content).to_bytes(8, "little")
        head = content[: _FRAME - 8]
        frame[8 : 8 + len(head)] = head
        self._broadcast(torch.frombuffer(frame, dtype=torch.uint8))
        if len(content) > len(head):
            self._broadcast(torch.frombuffer(bytearray(content[len(head) :]), dtype=torch.uint8))

    def receive_plan(self) -> StepPlan | None:
        """A follower: wait for rank 0's next plan; None means stop."""
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        content = frame.numpy().tobytes()
        length = int.from_bytes(content[:8], "little")
        head = content[8 : 8 + length]
        if length > len(head):
            rest = torch.empty(length - len(head), dtype=torch.uint8)
            self._broadcast(rest)
            head += rest.numpy().tobytes()
        plan: StepPlan | None = pickle.loads(head)
        return plan

    def min_flag(self, value: int) -> int:
        """The least `value` over all ranks: 0 from any rank vetoes."""
        if self.world == 1:
            return value
        flag = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        self._begin("min_flag")
        self._control.allreduce([flag], options).wait()
        return int(flag.item())

    def close(self) -> None:
        """Hang up: peers that wait in a collective fail at once. Harmless when repeated."""
        groups = {id(group): group for group in (self._data, self._control) if group is not None}
        self._control = self._data = None
        for group in groups.values():
            group.shutdown()

    def _begin(self, collective: str) -> None:
        self.calls += 1
        self.last = collective

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._begin("broadcast")
        self._control.broadcast([tensor], options).wait()


def _gloo(store: Store, rank: int, world: int, host: str, timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank, world, options)


def _nccl(store: Store, rank: int, world: int, timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL  # a CPU build of torch has none

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, world, options)
