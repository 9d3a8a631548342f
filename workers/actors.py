"""RankActor: one rank of a group in its own process. Rank 0 also runs the engine and talks to the ingresses.

A thin shell: it builds the parts, lends them threads, and carries calls. Knows neither Serve nor the coordinator nor
who owns it. torch is loaded by `load`, after the process has been told its thread count.

The call that lasts as long as the group (`drive`, `follow`) has a thread of its own, and so have the short calls, the
event streams, and the questions where it is stuck: nothing that reports, renews or aborts ever waits behind a stream or
a step, and a rank that hangs can still say where.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import ray

from workers.engine import Engine
from workers.errors import EngineRefused, Refused
from workers.loglevel import set_log_level
from workers.orders import Orders
from workers.outbox import Message
from workers.plan import GroupDead, GroupReport, Limits
from workers.rank import Rank, RankFacts
from workers.reader import Reader
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings
from workers.stacks import RankState
from workers.streams import EventStreams
from workers.switchboard import Doorway, Switchboard

WARM_UP = "warm-up"
"""The name under which rank 0 subscribes to its own engine, to see a first token."""


@ray.remote(concurrency_groups={"work": 1, "calls": 64, "events": 1024, "watch": 4})
class RankActor:
    """Rank `rank` of `settings.tensor_parallel_size`. Calls in order: open_store (rank 0 of several), load, build, then
    drive (rank 0) or follow (the others), which return when the group is stopped and raise when it is dead."""

    def __init__(self, rank: int, settings: GroupSettings) -> None:
        self._rank = rank
        self._settings = settings
        self._stopping = False
        self._parts = Rank(rank, settings)
        self._engine: Engine | None = None
        self._entered = asyncio.Event()
        self._streams: EventStreams | None = None
        self._doorway: asyncio.Task[Doorway] | None = None

    # -- building ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="work")
    def open_store(self) -> str:
        """Rank 0 opens the rendezvous: "host:port" for the others."""
        return self._parts.open_store(ray.util.get_node_ip_address())

    @ray.method(concurrency_group="work")
    def load(self, address: str | None) -> RankFacts:
        """Join the others at `address` (None for a lone rank), read this rank's weights, measure the largest step."""
        return self._parts.load(address, ray.util.get_node_ip_address())

    @ray.method(concurrency_group="work")
    def build(self, blocks: int, name: str) -> None:
        """Allocate `blocks`; on rank 0 put store, scheduler and engine of the group `name` on top."""
        self._parts.allocate(blocks)
        if self._rank == 0:
            self._engine = self._parts.make_engine(blocks, name)

    @ray.method(concurrency_group="work")
    def drive(self) -> None:
        """Rank 0: step until stopped. Raises GroupDead when a rank is gone."""
        engine = self._running()
        try:
            while not self._stopping:
                if not engine.turn(time.monotonic()):
                    engine.work.wait(engine.patience(time.monotonic()))
        finally:
            self._parts.stop()

    @ray.method(concurrency_group="work")
    def follow(self) -> None:
        """The other ranks: run the plans of rank 0 until its last one."""
        self._parts.follow()

    @ray.method(concurrency_group="calls")
    async def warm_up(self) -> float:
        """Generate a real token and give the seconds that took: only then is a group ready."""
        began = time.monotonic()
        engine = self._running()
        reader = Reader(asyncio.get_running_loop(), 0.0)
        reader.attach(engine.subscribe(WARM_UP, reader.wake, began))
        request = Request("warm-up", (0,), Sampling(max_tokens=2), secrets.token_bytes(32))
        engine.submit(WARM_UP, request)
        finished = False
        while not finished:
            message = await reader.next()
            if message is None:
                raise GroupDead("the first step failed") from engine.dead
            engine.renew(WARM_UP, time.monotonic())
            finished = any(event.finish for event in message.events)
        engine.unsubscribe(WARM_UP)
        return time.monotonic() - began

    @ray.method(concurrency_group="events")
    async def enter(self, epoch: int) -> None:
        """The coordinator knows this group as `epoch`: ingresses may subscribe from now on."""
        self._running().enter(epoch)
        self._entered.set()

    # -- for ingresses -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="events")
    async def doorway(self) -> Doorway | None:
        """Where ingresses may call and read events without Ray, once the coordinator knows this group; None: not so."""
        await self._entered.wait()
        if self._settings.streams == "ray":
            return None
        if self._doorway is None:
            self._doorway = asyncio.create_task(self._open_switchboard())
        return await asyncio.shield(self._doorway)

    @ray.method(concurrency_group="events")
    async def events(self, ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
        """EventStreams.read over Ray."""
        await self._entered.wait()
        async with aclosing(self._event_streams().read(ingress, acked)) as messages:
            async for message in messages:
                yield message

    @ray.method(concurrency_group="calls")
    async def submit(self, ingress: str, requests: Sequence[Request]) -> tuple[Refused | None, ...]:
        """Per request, in order: None when accepted."""
        return _submit(self._running(), ingress, requests)

    @ray.method(concurrency_group="calls")
    async def abort(self, keys: Sequence[tuple[str, int]]) -> None:
        """End these (request, attempt); unknown ones are ignored."""
        _abort(self._running(), keys)

    @ray.method(concurrency_group="calls")
    async def renew(self, ingress: str) -> bool:
        """Renew a lease; False when it has lapsed."""
        return self._running().renew(ingress, time.monotonic())

    @ray.method(concurrency_group="calls")
    async def ack(self, ingress: str, number: int) -> None:
        """`ingress` has handled messages up to `number`."""
        self._running().ack(ingress, number)

    @ray.method(concurrency_group="calls")
    async def unsubscribe(self, ingress: str) -> None:
        """`ingress` needs this group no more; its requests are aborted."""
        self._running().unsubscribe(ingress)

    @ray.method(concurrency_group="calls")
    async def purge(self, namespace: bytes) -> int:
        """Forget and zero what `namespace` has cached: the number of blocks, once none of it can be found any more."""
        return await asyncio.wrap_future(self._running().purge(namespace))

    # -- for the owner -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="calls")
    async def report(
        self, limits: Limits | None, void: Sequence[str], full: bool, orders: Orders | None = None
    ) -> GroupReport:
        """Obey the coordinator's last reply, then say how things stand. GroupDead when no step can answer any more."""
        engine = self._running()
        engine.obey(limits, void, orders)
        return await asyncio.wrap_future(engine.report(full=full))

    @ray.method(concurrency_group="watch")
    async def log_level(self, level: str) -> None:
        """How much this process says from now on."""
        set_log_level(level)

    @ray.method(concurrency_group="watch")
    async def state(self) -> RankState:
        """Where this rank is: its threads' stacks, its last plan, its last collective."""
        return self._parts.state()

    @ray.method(concurrency_group="watch")
    async def recording(self) -> str:
        """The flight recorder as JSON lines; empty where no engine runs."""
        lines = self._engine.recorder.dump() if self._engine else []
        return "".join(json.dumps(line) + "\n" for line in lines)

    @ray.method(concurrency_group="calls")
    async def drain(self) -> bool:
        """Refuse new requests; whether none is left."""
        engine = self._running()
        engine.drain()
        return engine.idle

    @ray.method(concurrency_group="calls")
    async def stop(self) -> None:
        """Let `drive` return after the step it is in, and the followers with it."""
        self._stopping = True
        if self._engine:
            self._engine.work.set()

    @ray.method(concurrency_group="calls")
    async def modules(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which of these modules this process has loaded."""
        return tuple(name for name in names if name in sys.modules)

    def _running(self) -> Engine:
        if self._engine is None:
            raise GroupDead(f"rank {self._rank} runs no engine")
        return self._engine

    def _event_streams(self) -> EventStreams:
        if self._streams is None:
            self._streams = EventStreams(self._running(), self._settings.stream_pace_s, time.monotonic)
        return self._streams

    async def _open_switchboard(self) -> Doorway:
        engine = self._running()
        calls: dict[str, Callable[..., Any]] = {
            "submit": partial(_submit, engine),
            "abort": partial(_abort, engine),
            "renew": lambda ingress: engine.renew(ingress, time.monotonic()),
            "ack": engine.ack,
        }
        return await Switchboard(calls, self._event_streams().read).listen(ray.util.get_node_ip_address())


def _submit(engine: Engine, ingress: str, requests: Sequence[Request]) -> tuple[Refused | None, ...]:
    return tuple(_refused(engine, ingress, request) for request in requests)


def _refused(engine: Engine, ingress: str, request: Request) -> Refused | None:
    try:
        engine.submit(ingress, request)
    except EngineRefused as refusal:
        return Refused(request.id, request.attempt, refusal.code, refusal.message)
    return None


def _abort(engine: Engine, keys: Sequence[tuple[str, int]]) -> None:
    for request, attempt in keys:
        engine.abort(request, attempt)
