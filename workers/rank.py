"""Rank: what one rank process is made of, from weights to engine. Loads torch when it is told to load, not before.

Knows nothing of Ray: an actor lends it a thread, a test may too. Every method belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.layout import KVLayout, Precision
from kvstore.store import KVStore
from workers.engine import Engine
from workers.errand import run_errand
from workers.memory import machine_bytes, pool_blocks, resident_bytes
from workers.plan import Limits
from workers.scheduler import Scheduler
from workers.settings import GroupSettings
from workers.stacks import RankState, thread_stacks

log = logging.getLogger(__name__)

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LEASE_S = 5.0
"""An ingress that does not renew for so long loses its requests here."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank found out while loading. `blocks` is how many its pool could have, `block_bytes` what one takes here,
    `used` the bytes in use before the pool, `seconds` how long loading took.
    `kernel` names the kernels that compute, `kernel_why` says why they; `kv` says in words what a token's keys and
    values look like here, `windows` are those of the layer groups."""

    rank: int
    pid: int
    node: str
    threads: int
    device: str
    kernel: str
    kernel_why: str
    blocks: int
    block_bytes: int
    kv: str
    windows: tuple[int | None, ...]
    used: int
    max_model_len: int
    seconds: float


class Rank:
    """Rank `rank` of `settings.tensor_parallel_size`. In order: open_store (rank 0 of several), load, allocate, then
    make_engine (rank 0) or follow. `state` may be asked for at any time, from any thread."""

    def __init__(self, rank: int, settings: GroupSettings) -> None:
        self._rank = rank
        self._settings = settings
        self._store: Any = None
        self._comm: Any = None
        self.runner: Any = None
        self._lead: Any = None
        self._max_model_len = 0
        self._scheme = b""

    def open_store(self, host: str) -> str:
        """Open the rendezvous on `host`: "host:port" for the other ranks."""
        from workers.parallel import open_store

        self._store, address = open_store(host)
        return address

    def load(self, address: str | None, host: str) -> RankFacts:
        """Join the others at `address` (None for a lone rank; `host` is where this rank listens), read this rank's
        weights, measure the largest step. Raises Unsupported, WeightError or NoRoom."""
        began = time.monotonic()
        threads, activations = run_errand(lambda: self._measured(address, host))
        settings, layout, choice = self._settings, self._layout, self.runner.choice
        total, used = _memory(settings.device)
        return RankFacts(
            rank=self._rank,
            pid=os.getpid(),
            node=host,
            threads=threads,
            device=settings.device,
            kernel=str(choice.kernels.name),
            kernel_why=choice.why,
            blocks=pool_blocks(settings, layout, total=total, used=used, activations=activations),
            block_bytes=layout.block_bytes,
            kv=layout.text,
            windows=tuple(group.window for group in layout.groups),
            used=used,
            max_model_len=self._max_model_len,
            seconds=time.monotonic() - began,
        )

    def allocate(self, blocks: int) -> None:
        """Allocate this rank's part of `blocks`."""
        run_errand(lambda: self.runner.allocate(blocks))

    def make_engine(self, blocks: int, name: str) -> Engine:
        """Rank 0: store, scheduler and engine of the group `name` over the ranks, which then wait for its plans."""
        from workers.lead import Lead

        settings, layout = self._settings, self._layout
        store = KVStore(
            blocks,
            settings.block_size,
            windows=tuple(group.window for group in layout.groups),
            ahead=settings.ahead,
            ttl=settings.session_ttl_s,
            prefix_cache=settings.prefix_cache,
            scheme=self._scheme,
        )
        limits = Limits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_num_batched_tokens)
        scheduler = Scheduler(store, limits, max_model_len=self._max_model_len)
        self._lead = Lead(self.runner, self._comm)
        return Engine(scheduler, self._lead, name=name, epoch=0, depth=settings.overlap, lease_s=LEASE_S)

    def follow(self) -> None:
        """The other ranks: run rank 0's plans until its last one; raises when rank 0 is gone."""
        from workers.lead import follow

        follow(self.runner, self._comm)

    def stop(self) -> None:
        """Rank 0: let the followers go. Raises nothing when they are gone already."""
        if self._lead:
            self._lead.stop()

    def state(self) -> RankState:
        """Where this rank is, whatever it waits for."""
        runner, comm = self.runner, self._comm
        return RankState(
            rank=self._rank,
            pid=os.getpid(),
            step=runner.last_step if runner else -1,
            drops=runner.drops if runner else 0,
            collectives=comm.calls if comm else 0,
            collective=comm.last if comm else "",
            stacks=thread_stacks(),
        )

    @property
    def _layout(self) -> KVLayout:
        layout: KVLayout = self.runner.layout
        return layout

    def _measured(self, address: str | None, host: str) -> tuple[int, int]:
        """Make the runner; its threads, and bytes of the largest step, 0 where the pool's size is given."""
        threads = self._make_runner(address, host)
        return threads, 0 if self._settings.kv_memory is not None else int(self.runner.profile())

    def _make_runner(self, address: str | None, host: str) -> int:
        """Weights and communicator; returns the threads that torch uses here."""
        import torch

        from workers.models.factory import read_spec
        from workers.parallel import Communicator, join_store
        from workers.runner import Runner
        from workers.selection import Wish

        settings, native = self._settings, self._settings.native_dir
        if settings.threads:
            torch.set_num_threads(settings.threads)
        folder = Path(settings.model_dir)
        spec = read_spec(folder)
        own = spec.context_length
        self._max_model_len = min(settings.max_model_len or own, own)
        dtype = _SHORT.get(spec.dtype, spec.dtype) if settings.dtype == "auto" else settings.dtype
        precision = settings.kv_precision.settle(Precision.parse(dtype))
        facts = (settings.revision, precision.spelled(spec.layers), settings.weight_precision, spec.ropes)
        self._scheme = "|".join(map(str, facts)).encode()
        device = torch.device(settings.device)
        if address is None:
            self._comm = Communicator.alone()
        else:
            store = self._store or join_store(address)
            world = settings.tensor_parallel_size
            self._comm = Communicator.connect(
                store, self._rank, world, host=host, device=device, library=_library(native)
            )
        self.runner = Runner(
            folder,
            spec,
            comm=self._comm,
            block_size=settings.block_size,
            precision=precision,
            dtype=dtype,
            device=settings.device,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            wish=Wish(settings.kernels, settings.weight_precision, Path(native) if native else None),
            checks=Path(settings.checks_dir) if settings.checks_dir else None,
            revision=settings.revision,
        )
        self._say_kernels()
        return int(torch.get_num_threads())

    def _say_kernels(self) -> None:
        choice = self.runner.choice
        level = logging.WARNING if choice.second_best else logging.INFO
        log.log(level, "rank %d computes with %s: %s", self._rank, choice.kernels.name, choice.why)


def _library(folder: str | None) -> Any:
    """The native library, by which ranks of one machine talk to each other; None where there is none."""
    from workers.native.library import NativeUnavailable, load_library

    try:
        return load_library(Path(folder) if folder else None)
    except NativeUnavailable:
        return None


def _memory(device: str) -> tuple[int, int]:
    """Bytes that the device has, and that this process has taken of it."""
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory), int(torch.cuda.memory_reserved())
    return machine_bytes(), resident_bytes()
