"""A cluster in one process and one event loop: a real coordinator with its line, real engines over shadow ranks, ports
that count and can fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

from cluster.coordination.cards import GroupCard, GroupState, SessionCopy
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, LineNews, Outcome, Refusal, Ticket
from cluster.coordination.terms import CoordinatorTerms
from cluster.generation import Generation
from cluster.namespaces import CacheKeys
from cluster.requests.dispatch import Requests
from cluster.requests.meter import Meter
from cluster.requests.ports import EnginePort
from cluster.requests.subscription import Rhythm
from cluster.requests.work import Endurance
from tests.shadow_engine import ShadowEngine, expected_output
from workers.errors import EngineRefused
from workers.outbox import Message
from workers.plan import Finish, GroupDead, TokenEvent
from workers.sequence import Request, Sampling

FAST = Rhythm(ack_messages=8, ack_s=0.01, renew_s=0.05, renewals=5, rotate_messages=50, backoff_s=0.005)
LEASE_S = 0.5


class InProcessGroup:
    """One engine with its step loop and reports. `steps_s` paces the steps."""

    def __init__(self, cluster: InProcessCluster, name: str, *, steps_s: float = 0.0, **engine: int) -> None:
        self.cluster = cluster
        self.address = f"at-{name}-{next(cluster.serial)}"
        self.engine = ShadowEngine(name=name, epoch=0, lease_s=LEASE_S, **engine)
        blocks = self.engine.blocks
        self.card = GroupCard(
            name, ("m",), self.address, blocks, self.engine.block_size, self.engine.max_num_seqs, 512, 4096
        )
        self.engine.epoch = cluster.coordinator.join(self.card, cluster.clock())
        self.work = asyncio.Event()
        self._full = True
        self.steps_s = steps_s
        self.tasks = [asyncio.create_task(self._step()), asyncio.create_task(self._report())]

    async def _step(self) -> None:
        while True:
            if not self.engine.turn(self.cluster.clock()):
                self.work.clear()
                try:
                    async with asyncio.timeout(0.05):  # leases lapse by themselves
                        await self.work.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(self.steps_s)

    async def _report(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(0.02)

    async def report(self) -> None:
        full, self._full = self._full, True  # until the coordinator has taken it
        future = self.engine.report(full=full)
        self.work.set()
        report = await asyncio.wrap_future(future)
        if self.cluster.port.down:
            return
        reply = self.cluster.coordinator.report(report, self.cluster.clock())
        self.cluster.port.ring()
        if not reply.known:
            self.engine.enter(self.cluster.coordinator.join(self.card, self.cluster.clock()))
            return
        self._full = False
        self.engine.obey(reply.limits, reply.void)

    async def kill(self) -> None:
        """The process is gone: streams break, calls find nobody."""
        self.engine.dead = GroupDead("killed")
        for outbox in self.engine.outboxes():
            outbox.close()
        await self.stop()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


class InProcessEngine:
    """EnginePort. `fail` maps a call's name to exceptions that its next calls raise."""

    def __init__(self, group: InProcessGroup, ingress: str) -> None:
        self.group, self.ingress = group, ingress
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, list[Exception]] = {}
        self.breaks = asyncio.Event()
        self.reading = 0

    async def _enter(self, call: str) -> ShadowEngine:
        self.calls[call] += 1
        await asyncio.sleep(0)
        if self.group.engine.dead:
            raise self.group.engine.dead
        if self.fail.get(call):
            raise self.fail[call].pop(0)
        return self.group.engine

    async def subscribe(self, acked: int | None) -> AsyncGenerator[Message, None]:
        engine = await self._enter("subscribe")
        ready = asyncio.Event()
        now = self.group.cluster.clock()
        if acked is None:
            outbox = engine.subscribe(self.ingress, ready.set, now)
        else:
            self.calls["resubscribe"] += 1
            outbox = engine.resubscribe(self.ingress, acked, ready.set, now)

        async def read() -> AsyncGenerator[Message, None]:
            self.reading += 1
            try:
                while True:
                    if self.breaks.is_set():
                        self.breaks.clear()
                        raise ConnectionError("the stream broke")
                    if engine.dead:
                        raise engine.dead
                    message = outbox.read()
                    if message is not None:
                        yield message
                    elif outbox.closed:
                        return
                    else:
                        await ready.wait()
                        ready.clear()
            finally:
                self.reading -= 1

        return read()

    async def submit(self, requests: tuple[Request, ...]) -> tuple[EngineRefused | None, ...]:
        engine = await self._enter("submit")
        answers: list[EngineRefused | None] = []
        for request in requests:
            try:
                engine.submit(self.ingress, request)
                answers.append(None)
            except EngineRefused as refused:
                answers.append(refused)
        self.group.work.set()
        return tuple(answers)

    async def abort(self, keys: tuple[tuple[str, int], ...]) -> None:
        engine = await self._enter("abort")
        for key in keys:
            engine.abort(*key)
        self.group.work.set()

    async def ack(self, number: int) -> None:
        (await self._enter("ack")).ack(self.ingress, number)

    async def renew(self) -> bool:
        return (await self._enter("renew")).renew(self.ingress, self.group.cluster.clock())

    async def unsubscribe(self) -> None:
        (await self._enter("unsubscribe")).unsubscribe(self.ingress)
        self.group.work.set()

    async def purge(self, namespace: bytes) -> int:
        future = (await self._enter("purge")).purge(namespace)
        self.group.work.set()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self.calls["close"] += 1


class InProcessCoordinator:
    """CoordinatorPort of one ingress. `down` makes every call fail, polls under way included; `outcomes`, `withdrawn`
    and `left` are what came through. `poll_s` is how long a poll waits."""

    def __init__(self, cluster: InProcessCluster, ingress: str) -> None:
        self.cluster = cluster
        self.ingress = ingress
        self.down = False
        self.poll_s = 0.1
        self.calls: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []
        self.withdrawn: list[str] = []
        self.left: list[tuple[str, int]] = []
        self._bell = asyncio.Event()

    def ring(self) -> None:
        """Wake the poll when the coordinator has news for it."""
        if self.ingress in self.cluster.coordinator.wakes():
            self._bell.set()

    async def _enter(self, call: str) -> Coordinator:
        self.calls[call] += 1
        await asyncio.sleep(0)
        if self.down:
            raise ConnectionError("the coordinator is down")
        return self.cluster.coordinator

    async def place(self, asks: tuple[Ask, ...]) -> tuple[Grant | Ticket | Refusal, ...]:
        answers = (await self._enter("place")).place(self.ingress, asks, self.cluster.clock())
        self.ring()
        return answers

    async def news(self, acked: int) -> LineNews:
        await self._enter("news")
        until = self.cluster.clock() + self.poll_s
        while True:
            self._bell.clear()
            if self.down:
                raise ConnectionError("the coordinator is down")
            news = self.cluster.coordinator.news(self.ingress, acked, self.cluster.clock())
            left = until - self.cluster.clock()
            if news.answers or left <= 0:
                return news
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), min(left, 0.02))

    async def leave_line(self, keys: tuple[tuple[str, int], ...]) -> None:
        (await self._enter("leave_line")).leave_line(keys, self.cluster.clock())
        self.ring()
        self.left += keys

    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        (await self._enter("settle")).settle(outcomes, self.cluster.clock())
        self.ring()
        self.outcomes += outcomes

    async def withdraw(self, grants: tuple[str, ...]) -> None:
        (await self._enter("withdraw")).withdraw(grants, self.cluster.clock())
        self.ring()
        self.withdrawn += grants

    async def groups(self) -> tuple[GroupState, ...]:
        return (await self._enter("groups")).groups(self.cluster.clock())

    async def session(self, namespaces: tuple[bytes, ...]) -> tuple[SessionCopy, ...]:
        return (await self._enter("session")).session(namespaces, self.cluster.clock())


class InProcessCluster:
    """Use as an async context manager; `requests` is the shell under test. `coordinator` takes the real one's place."""

    def __init__(
        self,
        endurance: Endurance | None = None,
        rhythm: Rhythm = FAST,
        *,
        terms: CoordinatorTerms | None = None,
        coordinator: Any = None,
        meter: Meter | None = None,
    ) -> None:
        self.serial = itertools.count(1)
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.terms = terms or CoordinatorTerms()
        self.coordinator: Coordinator = coordinator or Coordinator(self.terms, first_epoch=0, seed=1)
        self.port = InProcessCoordinator(self, "ingress-1")
        self.groups: dict[str, InProcessGroup] = {}
        self.engines: dict[str, InProcessEngine] = {}
        self.requests = Requests(
            self.port,
            self._engine,
            models=("m",),
            cache=lambda generation: CacheKeys(namespace_of(generation.tenant, generation.session)),
            sessions=lambda tenant, session: (namespace_of(tenant, session),),
            clock=self.clock,
            endurance=endurance,
            rhythm=rhythm,
            meter=meter,
        )
        self._time = asyncio.create_task(self._keep_time())

    async def _keep_time(self) -> None:
        while True:
            self.coordinator.tick(self.clock())
            self.port.ring()
            await asyncio.sleep(0.02)

    def restart_coordinator(self, first_epoch: int) -> None:
        """Another life, which knows nothing."""
        self.coordinator = Coordinator(self.terms, first_epoch=first_epoch, seed=1)

    async def __aenter__(self) -> InProcessCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.requests.aclose()
        self._time.cancel()
        await asyncio.wait([self._time])
        for group in self.groups.values():
            await group.stop()

    def add(self, name: str, *, steps_s: float = 0.0, **engine: int) -> InProcessGroup:
        group = InProcessGroup(self, name, steps_s=steps_s, **engine)
        self.groups[group.address] = group
        return group

    def port_to(self, group: InProcessGroup) -> InProcessEngine:
        return self.engines[group.address]

    def _engine(self, address: str) -> EnginePort:
        engine = self.engines[address] = InProcessEngine(self.groups[address], "ingress-1")
        return engine

    async def generate(self, name: str, most: int = 20, prompt: tuple[int, ...] = (1, 2, 3)) -> list[TokenEvent]:
        """All events of one generation."""
        return [event async for event in self.requests.generate(generation(name, most, prompt))]

    async def settled(self) -> None:
        """Return when everything has come back; fails after two seconds."""
        async with asyncio.timeout(2):
            while self.coordinator.waiting or any(
                state.committed or state.grants for state in self.coordinator.groups(self.clock())
            ):
                await asyncio.sleep(0.01)


def namespace_of(tenant: str, session: str | None) -> bytes:
    return f"{tenant}/{session}".encode()


def generation(name: str, most: int = 20, prompt: tuple[int, ...] = (1, 2, 3)) -> Generation:
    """A prompt of four tokens or more may stop early."""
    stop_ids = frozenset({7}) if len(prompt) > 3 else frozenset[int]()
    return Generation(name, prompt, Sampling(max_tokens=most, stop_ids=stop_ids), "m")


def check(events: list[TokenEvent], most: int = 20, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
    """The right tokens, in order, with one finish at the end."""
    tokens, finish = expected_output(prompt, generation("x", most, prompt).sampling)
    got: list[int] = []
    for event in events:
        assert event.index == len(got), events
        got += event.tokens
    assert tuple(got) == tokens
    assert [event.finish for event in events if event.finish] == [finish]
    assert events[-1].finish is finish and finish in (Finish.STOP, Finish.LENGTH)
