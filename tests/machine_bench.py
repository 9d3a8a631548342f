"""A request machine on a bench: its actions are collected, and time moves by hand."""

from __future__ import annotations

import itertools
from typing import Any

from cluster.coordination.grants import Ask, Grant, Refusal, Ticket
from cluster.requests import moves
from cluster.requests.machine import RequestMachine
from cluster.requests.work import Endurance, Work
from workers.plan import Finish, TokenEvent
from workers.sequence import Sampling

PROMPT = (1, 2, 3)


class Bench:
    """A machine with its actions collected; `now` moves by hand."""

    def __init__(
        self,
        most: int = 4,
        stop: frozenset[int] = frozenset(),
        endurance: Endurance | None = None,
        **work_fields: Any,
    ) -> None:
        work = Work("r", PROMPT, Sampling(max_tokens=most, stop_ids=stop), "m", b"n", **work_fields)
        self.machine = RequestMachine(work, endurance or Endurance())
        self.now = 0.0
        self.seen: list[moves.Action] = []
        self.grants = itertools.count(1)

    def feed(self, event: moves.Event) -> list[moves.Action]:
        actions = list(self.machine.on_event(event, self.now))
        self.seen += actions
        return actions

    def all(self, kind: type) -> list[object]:
        return [action for action in self.seen if isinstance(action, kind)]

    def grant(self, epoch: int = 1, group: str = "a") -> Grant:
        name = f"{group}/{epoch}/{next(self.grants)}"
        return Grant(name, "r", self.machine.history.attempt, group, epoch, f"at-{group}", 2, 5.0)

    def place(self, epoch: int = 1, group: str = "a") -> Grant:
        grant = self.grant(epoch, group)
        self.feed(moves.Placed(grant))
        return grant

    def run(self, epoch: int = 1) -> Grant:
        grant = self.place(epoch)
        self.feed(moves.Submitted(self.machine.history.attempt))
        return grant

    def arrive(self, index: int, *tokens: int, finish: Finish | None = None, **rest: object) -> list[moves.Action]:
        attempt = rest.pop("attempt", self.machine.history.attempt)
        epoch = rest.pop("epoch", 1)
        return self.feed(moves.Arrived(epoch, TokenEvent("r", attempt, index, tokens, finish, **rest)))  # type: ignore[arg-type]

    @property
    def end(self) -> moves.End:
        (end,) = self.all(moves.End)
        assert isinstance(end, moves.End)
        return end

    def closings(self) -> list[str]:
        settled = [a.outcome.grant for a in self.seen if isinstance(a, moves.Settle)]
        return settled + [a.grant for a in self.seen if isinstance(a, moves.Withdraw)]

    @property
    def last_ask(self) -> Ask:
        place = self.all(moves.Place)[-1]
        assert isinstance(place, moves.Place)
        return place.ask

    @property
    def alarm(self) -> float | None:
        wake = self.all(moves.Wake)[-1]
        assert isinstance(wake, moves.Wake)
        return wake.at

    def ring(self) -> list[moves.Action]:
        """Move to the time of the alarm."""
        assert self.alarm is not None
        self.now = self.alarm
        return self.feed(moves.Ticked())

    def queue(self, ahead: int = 3) -> None:
        self.feed(moves.Placed(Ticket("r", self.machine.history.attempt, ahead)))

    def refuse(self, code: str, retry_after: float | None = 1.0) -> list[moves.Action]:
        return self.feed(moves.Placed(Refusal("r", self.machine.history.attempt, code, "no", retry_after)))

    def die(self, epoch: int = 1, group: str = "a") -> list[moves.Action]:
        return self.feed(moves.GroupLost(group, epoch, gone=True))
