"""The asyncio shell around request machines: turns their actions into batched calls, and answers into their events.

Implements `Completer` for the routes over two ports, coordinator and engine. Decides nothing about a request; knows
neither HTTP nor Ray. One event loop; nothing polls, everything waits for a future or a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.coordination.grants import Ask, Outcome
from cluster.errors import ApiError
from cluster.generation import Generation, Health
from cluster.requests import moves
from cluster.requests.batcher import Batcher
from cluster.requests.crew import Crew
from cluster.requests.machine import RequestMachine
from cluster.requests.mailbox import Mailbox
from cluster.requests.ports import CoordinatorPort, EnginePort
from cluster.requests.readiness import Readiness
from cluster.requests.subscription import Rhythm, Subscription
from cluster.requests.wire import Wire
from cluster.requests.work import Endurance, Work
from workers.plan import TokenEvent

_log = logging.getLogger(__name__)

CLOSING_S = 5.0
"""How long the last settles may take when the ingress ends."""
SETTLE_DELAYS_S = (0.2, 0.5, 1.0, 2.0)
"""Between the tries to tell the coordinator how something ended; after the last it learns from the group's report."""


@dataclass(eq=False)
class _Job:
    """One request under way: its machine, what its client has not read, its alarm."""

    machine: RequestMachine
    mailbox: Mailbox = field(default_factory=Mailbox)
    alarm: asyncio.TimerHandle | None = None


class Requests:
    """`engines` gives the port to the group at an address; `namespace` derives the cache's root of a generation;
    `clock` is monotonic, in seconds. `models`: those that must have a group for health."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        engines: Callable[[str], EnginePort],
        *,
        models: tuple[str, ...],
        namespace: Callable[[Generation], bytes],
        clock: Callable[[], float],
        endurance: Endurance | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._engines = engines
        self._namespace = namespace
        self._clock = clock
        self._endurance = endurance or Endurance()
        self._rhythm = rhythm or Rhythm()
        self._readiness = Readiness(coordinator, models, clock)
        self._jobs: dict[str, _Job] = {}
        self._wires: dict[str, Wire] = {}
        self._crew = Crew("requests")
        self._asks: Batcher[tuple[_Job, Ask]] = Batcher(self._crew, self._send_asks)
        self._settles: Batcher[Outcome] = Batcher(self._crew, self._send_settles)
        self._withdrawals: Batcher[str] = Batcher(self._crew, self._send_withdrawals)
        self._closed = False

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenEvent, None]:
        """Events of one generation, the last with `finish`; several may come as one. ApiError before the first event
        when it is refused. Closing the generator aborts the generation."""
        if self._closed:
            raise ApiError("This server is shutting down.", "draining", retry_after=1.0)
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

    async def health(self) -> Health:
        """Ready when for each model some group is up: reports, and makes progress."""
        return await self._readiness.health()

    async def aclose(self) -> None:
        """End what runs, tell coordinator and groups, and leave no task behind."""
        self._closed = True
        for job in tuple(self._jobs.values()):
            job.mailbox.fail(ApiError("This server is shutting down.", "draining", retry_after=1.0))
            self._feed(job, moves.Cancelled())
        await asyncio.sleep(0)  # what this tick has collected is sent at its end
        await self._crew.finish(CLOSING_S)
        wires, self._wires = tuple(self._wires.values()), {}
        await asyncio.gather(*(wire.close() for wire in wires))
        await self._crew.dismiss()

    # -- machines -----------------------------------------------------------------------------------------------------

    def _open_job(self, generation: Generation) -> _Job:
        if generation.id in self._jobs:
            raise ValueError(f"generation {generation.id} is under way already")
        work = Work(
            id=generation.id,
            prompt=generation.prompt,
            sampling=generation.sampling,
            model=generation.model,
            namespace=self._namespace(generation),
            priority=generation.priority,
        )
        job = self._jobs[generation.id] = _Job(RequestMachine(work, self._endurance))
        return job

    def _feed(self, job: _Job, event: moves.Event) -> None:
        for action in job.machine.on_event(event, self._clock()):
            self._perform(job, action)

    def _perform(self, job: _Job, action: moves.Action) -> None:
        match action:
            case moves.Emit(event):
                job.mailbox.put(event)
            case moves.Place(ask):
                self._asks.add((job, ask))
            case moves.Submit(grant, request):
                self._wire_to(grant.address).submit(request, partial(self._feed, job))
            case moves.Abort(grant):
                if grant.address in self._wires:
                    self._wires[grant.address].abort(grant.request, grant.attempt)
            case moves.Settle(outcome):
                self._settles.add(outcome)
            case moves.Withdraw(name):
                self._withdrawals.add(name)
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
            answers = await self._coordinator.place(tuple(ask for _, ask in batch))
        except Exception as error:
            _log.warning("the coordinator did not answer: %r", error)
            for job, ask in batch:
                self._feed(job, moves.AskLost(ask.attempt))
            return
        for (job, _), answer in zip(batch, answers, strict=True):
            self._feed(job, moves.Placed(answer))

    async def _send_settles(self, batch: tuple[Outcome, ...]) -> None:
        await self._insist(lambda: self._coordinator.settle(batch))

    async def _send_withdrawals(self, batch: tuple[str, ...]) -> None:
        await self._insist(lambda: self._coordinator.withdraw(batch))

    async def _insist(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for delay in (*SETTLE_DELAYS_S, None):
            try:
                return await call()
            except Exception as error:
                if delay is None:
                    _log.warning("the coordinator was not told how requests ended: %r", error)
                    return
            await asyncio.sleep(delay)

    # -- groups -------------------------------------------------------------------------------------------------------

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
