"""The ingresses of a group: whose requests are whose, where their events go, and until when their leases hold.

No lock of its own: the engine's guards it. Knows neither sequences nor steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.outbox import Outbox
from workers.plan import TokenEvent

Key = tuple[str, int]
"""A request and its attempt."""


@dataclass(slots=True)
class Subscriber:
    """One ingress: its outbox, when its lease lapses, and its live requests."""

    outbox: Outbox
    lapses: float
    requests: set[Key] = field(default_factory=set)


class Subscribers:
    """By name. A lease lasts `lease_s` seconds from its last renewal."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._subscribers: dict[str, Subscriber] = {}
        self._ingress_of: dict[Key, str] = {}

    def __contains__(self, ingress: str) -> bool:
        return ingress in self._subscribers

    def values(self) -> tuple[Subscriber, ...]:
        return tuple(self._subscribers.values())

    def get(self, ingress: str) -> Subscriber | None:
        return self._subscribers.get(ingress)

    @property
    def outboxes(self) -> tuple[Outbox, ...]:
        return tuple(subscriber.outbox for subscriber in self._subscribers.values())

    @property
    def requests(self) -> int:
        """Requests that have not ended."""
        return len(self._ingress_of)

    @property
    def next_lapse(self) -> float | None:
        """When the first lease lapses."""
        return min((subscriber.lapses for subscriber in self._subscribers.values()), default=None)

    def open(self, ingress: str, outbox: Outbox, now: float) -> Subscriber | None:
        """A lease from now on; the one that it replaces, whose requests are to be aborted."""
        old = self._subscribers.get(ingress)
        self._subscribers[ingress] = Subscriber(outbox, now + self._lease_s)
        return old

    def renew(self, ingress: str, now: float) -> Subscriber | None:
        """None when there is no lease to renew."""
        subscriber = self._subscribers.get(ingress)
        if subscriber:
            subscriber.lapses = now + self._lease_s
        return subscriber

    def end_leases(self) -> None:
        """All have lapsed."""
        for subscriber in self._subscribers.values():
            subscriber.lapses = float("-inf")

    def lapsed(self, now: float) -> list[str]:
        """Those whose lease is over."""
        return [name for name, subscriber in self._subscribers.items() if subscriber.lapses <= now]

    def remove(self, ingress: str) -> Subscriber | None:
        return self._subscribers.pop(ingress, None)

    def accept(self, ingress: str, key: Key) -> None:
        """A request of `ingress` is live."""
        self._ingress_of[key] = ingress
        self._subscribers[ingress].requests.add(key)

    def is_live(self, key: Key) -> bool:
        return key in self._ingress_of

    def is_wanted(self, ingress: str, key: Key) -> bool:
        """Whether `ingress` still has the lease under which it sent the request."""
        subscriber = self._subscribers.get(ingress)
        return subscriber is not None and key in subscriber.requests

    def end(self, key: Key) -> None:
        """The request has ended."""
        subscriber = self._subscribers.get(self._ingress_of.pop(key, ""))
        if subscriber:
            subscriber.requests.discard(key)

    def route(self, events: Iterable[TokenEvent]) -> list[tuple[Outbox, list[TokenEvent]]]:
        """Which events go into which outbox; those of ingresses that are gone go nowhere."""
        boxes: dict[str, list[TokenEvent]] = {}
        for event in events:
            boxes.setdefault(self._ingress_of.get((event.request, event.attempt), ""), []).append(event)
        return [(self._subscribers[name].outbox, mail) for name, mail in boxes.items() if name in self._subscribers]
