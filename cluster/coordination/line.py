"""The waiting line of one model: bounded; interactive before batch, replays first, then by urgency and age, then fair.

Within a class, what an earlier attempt has promised (a replay) goes first. Among the levels of urgency the one goes
first whose oldest request has waited longest, each step of urgency counting as so much waiting; who of a level is next
says FairQueue. Knows no group and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.coordination.fairness import FairQueue
from cluster.coordination.grants import REFUSED_FULL, REFUSED_TENANT, Ask
from cluster.coordination.terms import LineBounds
from cluster.coordination.timers import Timers
from cluster.coordination.waiter import Waiter
from workers.sequence import Priority

BATCH_SHARE = 0.75
"""Of the line's bounds, batch requests may fill so much: a full line of them must not shut out interactive ones."""
_REPLAY = -1_000_000
"""The rank of replays; that of others is their urgency."""


@dataclass(slots=True)
class Queueing:
    """Of one class: who waits, and how long those waited who were granted."""

    ages: list[tuple[float, int]]
    tokens: int = 0
    served: int = 0
    served_s: float = 0.0

    def at(self, now: float) -> dict[str, float | int]:
        """For status: seconds, and counts since the start."""
        oldest = now - self.ages[0][0] if self.ages else 0.0
        median = now - self.ages[len(self.ages) // 2][0] if self.ages else 0.0
        return {
            "waiting": len(self.ages),
            "tokens": self.tokens,
            "oldest_s": round(oldest, 3),
            "median_s": round(median, 3),
            "served": self.served,
            "served_wait_s": round(self.served_s, 3),
        }


class Line:
    """`bounds` say how much may wait, and what waiting is worth."""

    def __init__(self, bounds: LineBounds) -> None:
        self.tokens = 0
        self.tenants: Counter[str] = Counter()
        self.classes = {priority: Queueing([]) for priority in Priority}
        self.bounds = bounds
        self._requests = 0
        self._bands: dict[Priority, dict[int, FairQueue]] = {priority: {} for priority in Priority}
        self._overdue: Timers[Waiter] = Timers()

    def __len__(self) -> int:
        return self._requests

    @property
    def best(self) -> Priority:
        """The class of who is first."""
        return Priority.INTERACTIVE if self._bands[Priority.INTERACTIVE] else Priority.BATCH

    @property
    def full(self) -> bool:
        """Whether it takes no further request of a usual size."""
        mean = self.tokens / self._requests if self._requests else 0.0
        return self._requests >= self.bounds.requests or self.tokens + mean > self.bounds.tokens

    def obstacle(self, ask: Ask, cost: int) -> tuple[str, float] | None:
        """Why `ask` may not join, and how many tokens must drain first; None when it may. A replay always may."""
        if ask.replay:
            return None
        share = ask.share
        if self.tenants[share.tenant] >= share.max_waiting:
            return REFUSED_TENANT, float(cost * max(1, len(self.tenants)))
        part = BATCH_SHARE if ask.priority is Priority.BATCH else 1.0
        requests = self._requests + 1 - part * self.bounds.requests
        tokens = self.tokens + cost - part * self.bounds.tokens
        if requests >= 1 or (tokens > 0 and self._requests):
            mean = self.tokens / self._requests if self._requests else cost
            return REFUSED_FULL, max(float(cost), tokens, requests * mean)
        return None

    def add(self, waiter: Waiter) -> None:
        """It takes its place."""
        ask = waiter.ask
        waiter.waits = True
        waiter.band = ask.priority
        waiter.rank = _REPLAY if ask.replay else ask.urgency
        self._requests += 1
        self.tokens += waiter.cost
        self.tenants[ask.share.tenant] += 1
        queueing = self.classes[ask.priority]
        queueing.tokens += waiter.cost
        insort(queueing.ages, (waiter.arrived, waiter.serial))
        self._enqueue(waiter)
        if waiter.band is Priority.BATCH:
            self._overdue.add(waiter.arrived + self.bounds.batch_s, waiter)

    def take(self, waiter: Waiter, now: float) -> None:
        """It is granted."""
        queueing = self.classes[waiter.ask.priority]
        queueing.served += 1
        queueing.served_s += max(0.0, now - waiter.arrived)
        self._leave(waiter, paid=True)

    def remove(self, waiter: Waiter) -> None:
        """It leaves without a grant."""
        self._leave(waiter, paid=False)

    def advance(self, now: float) -> None:
        """Batch requests that have waited too long become interactive ones."""
        for _, waiter in self._overdue.due(now):
            if waiter.waits and waiter.band is Priority.BATCH:
                self._dequeue(waiter, paid=False)
                waiter.band = Priority.INTERACTIVE
                self._enqueue(waiter)
        self._overdue.trim(self._requests, lambda _, waiter: waiter.waits)

    def walk(self) -> Iterator[Waiter]:
        """In the order in which they are to be served. Not to be changed meanwhile."""
        for queues in self._bands.values():
            if len(queues) == 1:
                yield from next(iter(queues.values())).walk()
            elif queues:
                for rank in sorted(queues, key=lambda rank: self._precedence(rank, queues[rank])):
                    yield from queues[rank].walk()

    def ahead_of(self, waiter: Waiter) -> int:
        """About how many are served before it."""
        own = self._bands[waiter.band]
        key = self._precedence(waiter.rank, own[waiter.rank])
        before = own[waiter.rank].ahead_of(waiter)
        before += sum(len(queue) for rank, queue in own.items() if self._precedence(rank, queue) < key)
        if waiter.band is Priority.BATCH:
            before += sum(len(queue) for queue in self._bands[Priority.INTERACTIVE].values())
        return before

    def check(self) -> None:
        """Recount everything from scratch."""
        waiters = list(self.walk())
        assert len(waiters) == self._requests == len({id(waiter) for waiter in waiters})
        assert all(waiter.waits for waiter in waiters)
        assert self.tokens == sum(waiter.cost for waiter in waiters)
        assert self.tenants == Counter(waiter.ask.share.tenant for waiter in waiters)
        for priority, queueing in self.classes.items():
            own = [waiter for waiter in waiters if waiter.ask.priority is priority]
            assert queueing.ages == sorted((waiter.arrived, waiter.serial) for waiter in own)
            assert queueing.tokens == sum(waiter.cost for waiter in own)

    def _precedence(self, rank: int, queue: FairQueue) -> tuple[bool, float]:
        return (rank != _REPLAY, queue.oldest + rank * self.bounds.aging_s)

    def _enqueue(self, waiter: Waiter) -> None:
        queues = self._bands[waiter.band]
        if waiter.rank not in queues:
            queues[waiter.rank] = FairQueue()
        queues[waiter.rank].add(waiter)

    def _dequeue(self, waiter: Waiter, *, paid: bool) -> None:
        queues = self._bands[waiter.band]
        queue = queues[waiter.rank]
        if paid:
            queue.take(waiter)
        else:
            queue.remove(waiter)
        if not len(queue):
            del queues[waiter.rank]

    def _leave(self, waiter: Waiter, *, paid: bool) -> None:
        ask = waiter.ask
        self._dequeue(waiter, paid=paid)
        waiter.waits = False
        self._requests -= 1
        self.tokens -= waiter.cost
        self.tenants[ask.share.tenant] -= 1
        if not self.tenants[ask.share.tenant]:
            del self.tenants[ask.share.tenant]
        queueing = self.classes[ask.priority]
        queueing.tokens -= waiter.cost
        del queueing.ages[bisect_left(queueing.ages, (waiter.arrived, waiter.serial))]
