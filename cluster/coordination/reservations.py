"""Groups that are kept free for one who waits: for a big request that others have passed long or often enough, and for
one that must run alone. Kept free, a group gets nothing else of that class or below, until what it runs has made room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cluster.coordination.groupview import GroupView
from cluster.coordination.placement import Placement
from cluster.coordination.terms import LineBounds
from cluster.coordination.view import View
from cluster.coordination.waiter import Waiter

PART = 4
"""At most every so manieth group of a model (and one at least) is kept free for somebody."""


class Reservations:
    """`offer` is told of groups that others may have again, and of those that may have room for whom they wait for."""

    def __init__(
        self, view: View, placement: Placement, bounds: LineBounds, offer: Callable[[GroupView], None]
    ) -> None:
        self._view = view
        self._placement = placement
        self.bounds = bounds
        self._offer = offer
        self._held: dict[str, dict[str, tuple[Waiter, GroupView]]] = {}

    def passed(self, waiters: Iterable[Waiter], now: float) -> None:
        """Another one was granted before each of `waiters`."""
        for waiter in waiters:
            waiter.let_pass(now)
            self.consider(waiter, now)

    def review(self, first: Iterable[Waiter], now: float) -> None:
        """These stand first in a line. Its head may be waiting for room that nobody behind it finds either."""
        head = True
        for waiter in first:
            if head and not waiter.reserved:
                waiter.passed_at = min(waiter.passed_at, waiter.tried_at)
                head = False
            self.consider(waiter, now)

    def consider(self, waiter: Waiter, now: float) -> None:
        """Keep a group free for it, if it is time and there is one."""
        bounds, ask = self.bounds, waiter.ask
        due = ask.alone or waiter.passed >= bounds.bypasses or now - waiter.passed_at >= bounds.bypass_s
        if not due or waiter.reserved or not waiter.waits:
            return
        held = self._held.setdefault(waiter.model, {})
        if len(held) >= max(1, len(self._view.serving.get(waiter.model, ())) // PART):
            return
        group = self._placement.reservable(waiter.model, ask)
        if group is not None:
            waiter.reserved, group.reserved = True, waiter
            held[ask.request] = (waiter, group)
            self._view.touch(group, now)
            self._offer(group)

    def release(self, waiter: Waiter, now: float) -> None:
        """Nothing is kept free for it any more."""
        if waiter.reserved:
            waiter.reserved = False
            _, group = self._held[waiter.model].pop(waiter.ask.request)
            group.reserved = None
            self._view.touch(group, now)
            self._offer(group)

    def release_void(self, now: float) -> None:
        """A group that may get no work is kept free for nobody."""
        for held in self._held.values():
            for waiter, group in list(held.values()):
                if not group.listed:
                    self.release(waiter, now)

    def check(self, waiting: Mapping[str, Waiter]) -> None:
        """Groups and waiters agree."""
        held = {request: pair for part in self._held.values() for request, pair in part.items()}
        for request, (waiter, group) in held.items():
            assert waiting[request] is waiter and waiter.reserved and group.reserved is waiter
        for group in self._view.groups.values():
            assert group.reserved is None or held[group.reserved.ask.request][1] is group
            assert not group.alone or group.alone in group.ledger.open
