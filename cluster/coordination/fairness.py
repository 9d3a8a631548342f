"""Who of one class and urgency is next: fair between tenants by weight, first come first served within one.

Start-time fair queuing (Goyal, Vin, Cheng, 1996): a tenant's virtual time grows by cost / weight with each request that
is taken; the tenant with the lowest goes next; one that comes anew begins at the lowest of those who wait, so that
absence saves up nothing. Knows no class, no group and no clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from cluster.coordination.waiter import TenantKey, Waiter

_LEAST_WEIGHT = 1e-6


class _Tenant:
    """`turn` is (virtual time, number); the lower number breaks ties. `items` are (arrived, serial, waiter), sorted."""

    __slots__ = ("items", "turn", "weight")

    def __init__(self, turn: tuple[float, int]) -> None:
        self.turn = turn
        self.weight = 1.0
        self.items: list[tuple[float, int, Waiter]] = []


class FairQueue:
    """All tenants that wait at one level. Empty, it has forgotten who is owed what."""

    def __init__(self) -> None:
        self._tenants: dict[TenantKey, _Tenant] = {}
        self._order: list[tuple[tuple[float, int], TenantKey]] = []
        self._ages: list[tuple[float, int]] = []
        self._ahead: dict[TenantKey, float] = {}
        self._now = 0.0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._ages)

    @property
    def oldest(self) -> float:
        """When the first of those who wait arrived."""
        return self._ages[0][0]

    def add(self, waiter: Waiter) -> None:
        """It takes its place by its first arrival among those of its tenant."""
        key = waiter.tenant
        tenant = self._tenants.get(key)
        if tenant is None:
            start = max(self._ahead.pop(key, 0.0), self._now)
            tenant = self._tenants[key] = _Tenant(self._turn(start))
            insort(self._order, (tenant.turn, key))
        tenant.weight = max(_LEAST_WEIGHT, waiter.ask.share.weight)
        insort(tenant.items, (waiter.arrived, waiter.serial, waiter))
        insort(self._ages, (waiter.arrived, waiter.serial))

    def take(self, waiter: Waiter) -> None:
        """Its turn has come: its tenant pays."""
        key = waiter.tenant
        tenant = self._tenants[key]
        self._now = max(self._now, self._order[0][0][0])
        del self._order[bisect_left(self._order, (tenant.turn, key))]
        tenant.turn = self._turn(tenant.turn[0] + waiter.cost / tenant.weight)
        insort(self._order, (tenant.turn, key))
        self.remove(waiter)

    def remove(self, waiter: Waiter) -> None:
        """It leaves, and nobody pays."""
        key, place = waiter.tenant, (waiter.arrived, waiter.serial)
        tenant = self._tenants[key]
        del self._ages[bisect_left(self._ages, place)]
        del tenant.items[bisect_left(tenant.items, place)]  # the shorter tuple sorts first
        if not tenant.items:
            del self._tenants[key]
            del self._order[bisect_left(self._order, (tenant.turn, key))]
            self._ahead[key] = tenant.turn[0]
            self._forget()

    def walk(self) -> Iterator[Waiter]:
        """All waiters in the order in which they would be taken, if none came. Not to be changed meanwhile."""
        again: list[tuple[tuple[float, int], TenantKey, int]] = []
        position = 0
        while again or position < len(self._order):
            if position < len(self._order) and (not again or self._order[position][0] < again[0][0]):
                (turn, key), index = self._order[position], 0
                position += 1
            else:
                turn, key, index = heapq.heappop(again)
            tenant = self._tenants[key]
            waiter = tenant.items[index][2]
            yield waiter
            if index + 1 < len(tenant.items):
                heapq.heappush(again, ((turn[0] + waiter.cost / tenant.weight, turn[1]), key, index + 1))

    def ahead_of(self, waiter: Waiter) -> int:
        """About how many are taken before it: as many of each other tenant as of its own."""
        place = bisect_left(self._tenants[waiter.tenant].items, (waiter.arrived, waiter.serial))
        return min(len(self) - 1, place * len(self._tenants))

    def _turn(self, at: float) -> tuple[float, int]:
        self._numbers += 1
        return at, self._numbers

    def _forget(self) -> None:
        """What is behind the present says nothing any more."""
        if not self._tenants:
            self._ahead.clear()
        elif len(self._ahead) > 2 * len(self._tenants) + 64:
            self._ahead = {key: at for key, at in self._ahead.items() if at > self._now}
