"""What became of the tickets of each ingress, numbered, until it has acknowledged it; and which ingresses still listen.

Knows no line: what an answer is worth when it is told again, its user says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from cluster.coordination.grants import Grant, Refusal
from cluster.coordination.waiter import Waiter

Answer = Grant | Refusal

REMEMBERED = 4096
"""How many ingresses that have lapsed are remembered, to be told so when they come back."""
_IDLE = 60.0


@dataclass(slots=True, eq=False)
class Outbox:
    """Of one ingress. `life` is what it is told; `waiters` are its requests that stand in a line."""

    life: int
    heard_at: float
    number: int = 1
    answers: deque[tuple[int, Answer]] = field(default_factory=deque)
    waiters: dict[str, Waiter] = field(default_factory=dict)


class Newsroom:
    """`life` identifies this coordinator's life. An ingress that has not asked for news for `lapse_s` lapses; when it
    comes back it is told another life, since its tickets are as lost as if the coordinator had been restarted."""

    def __init__(self, life: int, lapse_s: float) -> None:
        self._life = life
        self._lapse_s = lapse_s
        self._outboxes: dict[str, Outbox] = {}
        self._lapsed: OrderedDict[str, None] = OrderedDict()
        self._woken: dict[str, None] = {}
        self._other_lives = 0

    def __len__(self) -> int:
        return len(self._outboxes)

    def outbox(self, ingress: str, now: float) -> Outbox:
        """Its outbox, from now on if it had none."""
        found = self._outboxes.get(ingress)
        if found is None:
            life = self._another_life() if ingress in self._lapsed else self._life
            found = self._outboxes[ingress] = Outbox(life, now)
            self._lapsed.pop(ingress, None)
        return found

    def expect(self, ingress: str, waiter: Waiter, now: float) -> None:
        """The ingress will want to know what becomes of `waiter`: from now on it should listen."""
        outbox = self.outbox(ingress, now)
        if not outbox.waiters:
            outbox.heard_at = now
        outbox.waiters[waiter.ask.request] = waiter

    def forget(self, ingress: str, request: str) -> None:
        """It stands in no line any more."""
        outbox = self._outboxes.get(ingress)
        if outbox is not None:
            outbox.waiters.pop(request, None)

    def post(self, ingress: str, answer: Answer) -> None:
        """The answer to one of its tickets; nothing when it has lapsed."""
        outbox = self._outboxes.get(ingress)
        if outbox is not None:
            outbox.number += 1
            outbox.answers.append((outbox.number, answer))
            self._woken[ingress] = None

    def read(self, ingress: str, acked: int, now: float) -> Outbox:
        """All that it has not acknowledged lies in the outbox."""
        outbox = self.outbox(ingress, now)
        if acked > outbox.number and outbox.life == self._life:
            outbox.life = self._another_life()  # it knows of news that we do not
        outbox.heard_at = now
        while outbox.answers and outbox.answers[0][0] <= acked:
            outbox.answers.popleft()
        return outbox

    def wakes(self) -> tuple[str, ...]:
        """Who has got answers since the last call."""
        woken, self._woken = tuple(self._woken), {}
        return woken

    def lapse(self, now: float) -> list[Waiter]:
        """Forget the ingresses that do not listen any more; these waited for them."""
        orphans: list[Waiter] = []
        for name in [name for name, box in self._outboxes.items() if self._is_gone(box, now)]:
            orphans += self._outboxes.pop(name).waiters.values()
            self._lapsed[name] = None
            if len(self._lapsed) > REMEMBERED:
                self._lapsed.popitem(last=False)
        return orphans

    def _is_gone(self, box: Outbox, now: float) -> bool:
        """One that has nothing to hear may be silent for long."""
        patience = self._lapse_s if box.waiters or box.answers else _IDLE * self._lapse_s
        return now - box.heard_at > patience

    def _another_life(self) -> int:
        """Different from any other, those of other coordinators' lives included: lives grow, by much more than this."""
        self._other_lives += 1
        return -(self._life + self._other_lives)
