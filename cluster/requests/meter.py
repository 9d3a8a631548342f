"""What can be measured of a request from the outside: an observer that the shell tells, and the stopwatch that knows
what to tell. Seconds come from the shell's clock. Knows no metrics library; an observer can change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.requests import moves
from cluster.requests.machine import RequestMachine
from cluster.requests.verdicts import POISONED
from workers.plan import Finish, TokenEvent
from workers.sequence import Priority

LEFT = "client_closed"
"""`Ending.finish` of a request whose client has left."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Whose request, and what kind. Tenants and models are those of the operator, but there may be many of them."""

    model: str
    tenant: str
    priority: Priority


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended. `finish` is "stop", "length", the code of the error that ended it, or LEFT; `seconds` count
    from its arrival; `output_tokens` are those that the client was sent, `cached_tokens` prompt tokens that its first
    attempt found in the cache. `replays` are attempts beyond the first that a group had accepted, `deaths` those of
    groups while they ran it; `poisoned`: it was given up because it kills groups."""

    finish: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    replays: int
    deaths: int
    poisoned: bool


class Meter(Protocol):
    """Told in the event loop of the ingress, so each call must return at once."""

    def accepted(self, labels: Labels, seconds: float) -> None:
        """A group has taken the request for the first time, `seconds` after it arrived: its queue time."""
        ...

    def first_token(self, labels: Labels, seconds: float) -> None:
        """The first token came `seconds` after the request's arrival."""
        ...

    def next_tokens(self, labels: Labels, seconds: float, tokens: int) -> None:
        """`tokens` more came together, `seconds` after those before them."""
        ...

    def ended(self, labels: Labels, ending: Ending) -> None:
        """The request is over; told once for each."""
        ...


class NoMeter:
    """Measures nothing."""

    def accepted(self, labels: Labels, seconds: float) -> None:
        """Nothing."""

    def first_token(self, labels: Labels, seconds: float) -> None:
        """Nothing."""

    def next_tokens(self, labels: Labels, seconds: float, tokens: int) -> None:
        """Nothing."""

    def ended(self, labels: Labels, ending: Ending) -> None:
        """Nothing."""


class Stopwatch:
    """Follows one machine and tells `meter` about it; `now` is when the request arrived."""

    def __init__(self, machine: RequestMachine, meter: Meter, now: float) -> None:
        self._machine = machine
        self._meter = meter
        self._began = now
        self._token_at: float | None = None
        self._accepted = False
        work = machine.work
        self._labels = Labels(work.model, work.share.tenant, work.priority)

    def look(self, actions: tuple[moves.Action, ...], now: float) -> None:
        """The machine has answered an event with `actions`."""
        machine = self._machine
        if not self._accepted and machine.history.accepted:
            self._accepted = True
            self._meter.accepted(self._labels, now - self._began)
        for action in actions:
            match action:
                case moves.Emit(event):
                    self._count(event, now)
                case moves.End(event):
                    if event is not None:
                        self._count(event, now)
                    self._meter.ended(self._labels, self._ending(event, now))

    def _count(self, event: TokenEvent, now: float) -> None:
        if not event.tokens:
            return
        if self._token_at is None:
            self._meter.first_token(self._labels, now - self._began)
        else:
            self._meter.next_tokens(self._labels, now - self._token_at, len(event.tokens))
        self._token_at = now

    def _ending(self, event: TokenEvent | None, now: float) -> Ending:
        machine = self._machine
        left = Finish.STOP.value if machine.satisfied else LEFT
        finish = machine.fault or (event.finish.value if event is not None and event.finish is not None else left)
        return Ending(
            finish=finish,
            seconds=now - self._began,
            prompt_tokens=len(machine.work.prompt),
            cached_tokens=machine.transcript.cached or 0,
            output_tokens=len(machine.output),
            replays=max(0, machine.history.accepted - 1),
            deaths=machine.history.deaths,
            poisoned=machine.fault == POISONED,
        )
