"""The groups that may get work, ordered by load, so that placing looks at a few of them, however many there are.

Groups of the same models and about the same size share a sorted list: finding a place in it takes the logarithm of its
length, and moving what lies behind is one copy of a few bytes per group. Knows no request.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from cluster.coordination.grants import Incarnation
from cluster.coordination.groupview import GroupView

SHOWN = 8
"""How many of a list are shown, at most."""
LOOKED_AT = 64
"""How many of a list are looked at for that, at most."""
SIZES_PER_OCTAVE = 4
"""Groups whose capacity differs by less than this share a list: pools measured on real machines are rarely equal."""

_Place = tuple[float, int, GroupView]
"""(rank, the group's number, group)"""


class _Order:
    """One list. `longest` is the longest sequence that any group that ever stood in it could hold."""

    __slots__ = ("longest", "places")

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.longest = 0

    def add(self, group: GroupView) -> None:
        group.place = (group.rank, group.number)
        insort(self.places, (*group.place, group))

    def remove(self, group: GroupView) -> None:
        assert group.place is not None
        del self.places[bisect_left(self.places, group.place)]  # the shorter tuple sorts first
        group.place = None


class Roster:
    """`put` a group when it comes up and whenever its load has changed, `remove` it when it may get nothing."""

    def __init__(self) -> None:
        self._orders: dict[tuple[tuple[str, ...], int], _Order] = {}
        self._by_model: dict[str, list[_Order]] = {}

    def put(self, group: GroupView) -> None:
        """It stands where its rank says."""
        if group.place == (group.rank, group.number):
            return
        order = self._order(group)
        if group.place is not None:
            order.remove(group)
        order.add(group)

    def remove(self, group: GroupView) -> None:
        """It stands nowhere."""
        if group.place is not None:
            self._order(group).remove(group)

    def heads(self, model: str, need: int, avoid: tuple[Incarnation, ...] = ()) -> Iterator[GroupView]:
        """Of each size the least loaded groups that serve `model` and can hold `need` tokens, in order."""
        for order in self._by_model.get(model, ()):
            shown = 0
            for _, _, group in order.places[:LOOKED_AT] if order.longest >= need else ():
                if group.longest >= need and group.incarnation not in avoid:
                    yield group
                    shown += 1
                    if shown == SHOWN:
                        break

    def _order(self, group: GroupView) -> _Order:
        key = (group.card.models, int(math.log2(group.longest) * SIZES_PER_OCTAVE))
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = _Order()
            for model in group.card.models:
                self._by_model.setdefault(model, []).append(order)
        order.longest = max(order.longest, group.longest)
        return order
