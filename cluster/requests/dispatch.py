"""The asyncio shell around request machines: turns their actions into batched calls, and answers into their events.

Implements `Completer` for the routes over two ports, coordinator and engine. Decides nothing about a request; knows
neither HTTP nor Ray. One event loop; nothing polls, everything waits for a future or a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.coordination.cards import GroupState, SessionCopy
from cluster.coordination.grants import Ask, Grant, Incarnation, Refusal
from cluster.errors import ApiError
from cluster.generation import Generation, Health
from cluster.namespaces import CacheKeys
from cluster.requests import moves
from cluster.requests.batcher import Batcher
from cluster.requests.crew import Crew
from cluster.requests.directory import Directory
from cluster.requests.line import LineWatch
from cluster.requests.machine import RequestMachine
from cluster.requests.mailbox import Mailbox
from cluster.requests.meter import Meter, NoMeter, Stopwatch
from cluster.requests.outgoing import Outgoing
from cluster.requests.ports import CoordinatorPort, EnginePort
from cluster.requests.readiness import Readiness
from cluster.requests.sessions import SessionDesk
from cluster.requests.subscription import Rhythm, Subscription
from cluster.requests.wire import Wire
from cluster.requests.work import Endurance, Phase, Work
from workers.plan import TokenEvent

_log = logging.getLogger(__name__)

CLOSING_S = 5.0
"""How long the last settles may take when the ingress ends."""
PLACE_S = 2.0
"""A coordinator that has not placed after so long, though it never waits, counts as away."""


@dataclass(eq=False)
class _Job:
    """One request under way: its machine, what its client has not read, its alarm, and the groups that it has `tried`
    by itself while the coordinator was away."""

    machine: RequestMachine
    watch: Stopwatch
    mailbox: Mailbox = field(default_factory=Mailbox)
    alarm: asyncio.TimerHandle | None = None
    tried: set[Incarnation] = field(default_factory=set)


class Requests:
    """`engines` gives the port to the group at an address; `cache` says where and how what a generation computes is
    cached, `sessions` all namespaces of a (tenant, session); `clock` is monotonic, in seconds. `models`: those that
    must have a group for health. `meter` is told what becomes of the requests."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        engines: Callable[[str], EnginePort],
        *,
        models: tuple[str, ...],
        cache: Callable[[Generation], CacheKeys],
        sessions: Callable[[str, str], tuple[bytes, ...]],
        clock: Callable[[], float],
        endurance: Endurance | None = None,
        rhythm: Rhythm | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._engines = engines
        self._cache = cache
        self._clock = clock
        self._endurance = endurance or Endurance()
        self._rhythm = rhythm or Rhythm()
        self._meter = meter or NoMeter()
        self._directory = Directory(coordinator, clock)
        self._readiness = Readiness(self._directory, models, clock)
        self._desk = SessionDesk(coordinator, self._directory, self._engine_at, sessions)
        self._line = LineWatch(coordinator, deliver=self._hear, lost=self._lose_line, waiting=self._anybody_waits)
        self._jobs: dict[str, _Job] = {}
        self._wires: dict[str, Wire] = {}
        self._crew = Crew("requests")
        self._asks: Batcher[tuple[_Job, Ask]] = Batcher(self._crew, self._send_asks)
        self._outgoing = Outgoing(coordinator, self._crew)
        self._closed = False

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenEvent, None]:
        """Events of one generation, the last with `finish`; several may come as one. ApiError before the first event
        when it is refused. Closing the generator aborts the generation."""
        if self._closed:
            raise _closing()
        job = self._open_job(generation)
        try:
            self._feed(job, moves.Started())
            while True:
                event = await job.mailbox.get()
                yield event
                if event.finish is not None:
                    return
        finally:
            self._feed(job, moves.Cancelled())

    def satisfy(self, id: str) -> None:
        """The client of generation `id` has all it wanted: end what still runs of it."""
        job = self._jobs.get(id)
        if job is not None:
            self._feed(job, moves.Satisfied())

    def ahead(self, id: str) -> int | None:
        """How many stood before generation `id` in the line when last told; None while it does not stand there."""
        job = self._jobs.get(id)
        return job.machine.ahead if job is not None else None

    def endure(self, endurance: Endurance) -> None:
        """How much requests put up with that come from now on."""
        self._endurance = endurance

    async def health(self) -> Health:
        """Ready when for each model some group is up: reports, and makes progress."""
        return await self._readiness.health()

    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, as the coordinator sees them now; whatever the call raises. Also kept for when it is away."""
        return await self._directory.groups()

    async def session(self, tenant: str, session: str) -> tuple[SessionCopy, ...]:
        """What is cached of a tenant's session, by group. ApiError when nobody knows now."""
        return await self._desk.session(tenant, session)

    async def forget_session(self, tenant: str, session: str) -> int:
        """Forget and zero a session in every group; the blocks, once all groups that live have confirmed. ApiError when
        one has not."""
        return await self._desk.forget(tenant, session)

    async def aclose(self) -> None:
        """End what runs, tell coordinator and groups, and leave no task behind."""
        self._closed = True
        for job in tuple(self._jobs.values()):
            job.mailbox.fail(_closing())
            self._feed(job, moves.Cancelled())
        await self._line.close()
        await asyncio.sleep(0)  # what this tick has collected is sent at its end
        await self._crew.finish(CLOSING_S)
        wires, self._wires = tuple(self._wires.values()), {}
        await asyncio.gather(*(wire.close() for wire in wires))
        await self._crew.dismiss()

    # -- machines -----------------------------------------------------------------------------------------------------

    def _open_job(self, generation: Generation) -> _Job:
        if generation.id in self._jobs:
            raise ValueError(f"generation {generation.id} is under way already")
        machine = RequestMachine(_work(generation, self._cache(generation)), self._endurance)
        job = _Job(machine, Stopwatch(machine, self._meter, self._clock()))
        self._jobs[generation.id] = job
        return job

    def _feed(self, job: _Job, event: moves.Event) -> None:
        now = self._clock()
        actions = job.machine.on_event(event, now)
        for action in actions:
            self._perform(job, action)
        job.watch.look(actions, now)
        if job.machine.phase is Phase.QUEUED:
            self._line.begin()

    def _perform(self, job: _Job, action: moves.Action) -> None:
        match action:
            case moves.Emit(event):
                job.mailbox.put(event)
            case moves.Place(ask):
                self._asks.add((job, ask))
            case moves.Leave(request, attempt):
                self._outgoing.leave(request, attempt)
            case moves.Submit(grant, request):
                self._wire_to(grant.address).submit(request, partial(self._feed, job))
            case moves.Abort(grant):
                if grant.address in self._wires:
                    self._wires[grant.address].abort(grant.request, grant.attempt)
            case moves.Settle(outcome):
                self._outgoing.settle(outcome)
            case moves.Withdraw(name):
                self._outgoing.withdraw(name)
            case moves.Wake(at):
                self._set_alarm(job, at)
            case moves.End():
                self._end(job, action)

    def _end(self, job: _Job, end: moves.End) -> None:
        del self._jobs[job.machine.work.id]
        if end.event is not None:
            job.mailbox.put(end.event)
        elif end.refusal is not None:
            refusal = end.refusal
            job.mailbox.fail(ApiError(refusal.message, refusal.code, retry_after=refusal.retry_after))

    def _set_alarm(self, job: _Job, at: float | None) -> None:
        if job.alarm:
            job.alarm.cancel()
            job.alarm = None
        if at is not None:
            delay = max(0.0, at - self._clock())
            job.alarm = asyncio.get_running_loop().call_later(delay, self._feed, job, moves.Ticked())

    # -- coordinator --------------------------------------------------------------------------------------------------

    async def _send_asks(self, batch: tuple[tuple[_Job, Ask], ...]) -> None:
        try:
            async with asyncio.timeout(PLACE_S):
                answers = await self._coordinator.place(tuple(ask for _, ask in batch))
        except Exception as error:
            _log.warning("the coordinator did not answer: %r", error)
            for job, ask in batch:
                self._go_without(job, ask)
            return
        for (job, _), answer in zip(batch, answers, strict=True):
            job.tried.clear()
            self._feed(job, moves.Placed(answer))
        if self._directory.stale:
            self._crew.start(self._directory.refresh())

    def _go_without(self, job: _Job, ask: Ask) -> None:
        """The coordinator is away: a group that is known may take the request; when each has been tried, rest."""
        grant = self._directory.grant(ask, job.tried)
        if grant is None:
            job.tried.clear()
        self._feed(job, moves.Placed(grant) if grant else moves.AskLost(ask.attempt))

    def _hear(self, answer: Grant | Refusal) -> None:
        """What became of a ticket."""
        job = self._jobs.get(answer.request)
        if job is not None:
            self._feed(job, moves.Placed(answer))
        elif isinstance(answer, Grant):
            self._outgoing.withdraw(answer.id)  # its request has ended

    def _lose_line(self) -> None:
        for job in tuple(self._jobs.values()):
            self._feed(job, moves.LineLost())

    def _anybody_waits(self) -> bool:
        return any(job.machine.phase is Phase.QUEUED for job in self._jobs.values())

    # -- groups -------------------------------------------------------------------------------------------------------

    def _engine_at(self, address: str) -> EnginePort:
        wire = self._wires.get(address)
        return wire.port if wire is not None else self._engines(address)

    def _wire_to(self, address: str) -> Wire:
        wire = self._wires.get(address)
        if wire is None:
            subscription = Subscription(
                self._engines(address),
                self._rhythm,
                deliver=self._deliver,
                lose=lambda gone: self._lose(address, gone),
                busy=lambda: any(_is_at(job, address) for job in self._jobs.values()),
                clock=self._clock,
            )
            wire = self._wires[address] = Wire(subscription, self._crew)
        return wire

    def _deliver(self, epoch: int, event: TokenEvent) -> None:
        job = self._jobs.get(event.request)
        if job is not None:
            self._feed(job, moves.Arrived(epoch, event))

    def _lose(self, address: str, gone: bool) -> None:
        self._wires.pop(address, None)
        for job in tuple(self._jobs.values()):
            current = job.machine.current
            if current is not None and _is_at(job, address):
                self._feed(job, moves.GroupLost(current.grant.group, current.grant.epoch, gone))


def _is_at(job: _Job, address: str) -> bool:
    current = job.machine.current
    return current is not None and current.grant.address == address


def _work(generation: Generation, keys: CacheKeys) -> Work:
    return Work(
        id=generation.id,
        prompt=generation.prompt,
        sampling=generation.sampling,
        model=generation.model,
        namespace=keys.namespace,
        priority=generation.priority,
        share=generation.share,
        urgency=generation.urgency,
        timeout_s=generation.timeout_s,
        terms=keys.terms,
        affinity=keys.affinity,
    )


def _closing() -> ApiError:
    return ApiError("This server is shutting down.", "draining", retry_after=1.0)
