"""Communicator: what a rank says to the other ranks of its group. It knows tensors and plans, not models.

Ranks of one machine share memory where they can: a collective then takes microseconds. Else, and between machines, they
use gloo; between GPUs tensors go through NCCL. All ranks of a group take the same way.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from workers.codec import pack, unpack
from workers.gloo import GroupChannel
from workers.native.library import Library
from workers.plan import StepPlan
from workers.segment import NotShared
from workers.sharedmemory import SharedChannel, decline, meet

_log = logging.getLogger(__name__)


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
    show by them who is behind. `transport` says which way they go.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        control: GroupChannel | SharedChannel | None,
        data: GroupChannel | SharedChannel | None,
        transport: str = "",
    ) -> None:
        self.rank = rank
        self.world = world
        self.transport = transport
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
        cls,
        store: Store,
        rank: int,
        world: int,
        *,
        host: str,
        device: torch.device,
        timeout_s: float = 600.0,
        library: Library | None = None,
    ) -> Communicator:
        """Meet the other ranks at `store`; `host` is this rank's own address, the only one it listens on. Without the
        native `library` on every rank there is no shared memory."""
        if world == 1:
            return cls.alone()
        control, transport = _control(store, rank, world, host, timeout_s, library)
        if device.type == "cpu":
            return cls(rank, world, control, control, transport)
        data = GroupChannel.nccl(PrefixStore("data", store), rank, world, timeout_s=timeout_s)
        return cls(rank, world, control, data, f"nccl, plans through {transport}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of fp32 `tensor` (contiguous, any shape), in place."""
        if self.world > 1:
            self._begin("all_reduce", self._data).sum(tensor)
        return tensor

    def all_reduce_onto(self, part: Tensor, stream: Tensor) -> Tensor:
        """`stream` plus the sum over ranks of fp32 `part` (contiguous, of its shape), in stream's dtype. Both are used
        up: the stream handed in may be the one that comes back, changed."""
        if self.world == 1:
            return stream + part.to(stream.dtype)
        return self._begin("all_reduce", self._data).sum_onto(part, stream)

    def gather_logits(self, local: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: [S, sum(widths)] from each rank's fp32 [S, widths[rank]], in rank order, until the next call; None
        elsewhere."""
        if self.world == 1:
            return local
        return self._begin("gather", self._data).gather(local, widths)

    def broadcast_plan(self, plan: StepPlan | None) -> None:
        """Rank 0: send `plan` to all followers; None ends their loops."""
        if self.world > 1:
            self._begin("broadcast", self._control).send(pack(plan))

    def receive_plan(self) -> StepPlan | None:
        """A follower: wait for rank 0's next plan; None means stop."""
        plan: StepPlan | None = unpack(self._begin("broadcast", self._control).receive())
        return plan

    def min_flag(self, value: int) -> int:
        """The least `value` over all ranks: 0 from any rank vetoes."""
        return value if self.world == 1 else self._begin("min_flag", self._control).least(value)

    def close(self) -> None:
        """Hang up: peers that wait in a collective fail at once. Harmless when repeated."""
        channels = {id(channel): channel for channel in (self._data, self._control) if channel is not None}
        self._control = self._data = None
        for channel in channels.values():
            channel.close()

    def _begin(self, collective: str, channel: GroupChannel | SharedChannel | None) -> GroupChannel | SharedChannel:
        if channel is None:
            raise RuntimeError(f"{collective}: this rank has hung up")
        self.calls += 1
        self.last = collective
        return channel


def _control(
    store: Store, rank: int, world: int, host: str, timeout_s: float, library: Library | None
) -> tuple[GroupChannel | SharedChannel, str]:
    """What carries plans, and its name."""
    shared = PrefixStore("shared", store)
    try:
        if library is None:
            decline(shared, rank, "no native library")
            raise NotShared("no native library")
        return meet(library, shared, rank, world, timeout_s=timeout_s), "shared memory"
    except NotShared as obstacle:
        if rank == 0:
            _log.info("ranks talk through gloo: %s", obstacle)
        return GroupChannel.gloo(PrefixStore("control", store), rank, world, host=host, timeout_s=timeout_s), "gloo"
