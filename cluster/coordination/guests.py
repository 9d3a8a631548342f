"""Guests of a group: requests of tenants that have nothing else there, while others keep it busy.

A tenant that asks little need not wait until one that floods ends something: a few blocks are kept from those that
have much, as many as the quiet ones took when they were last here. Counts blocks of one group; decides nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

_REMEMBERED = 8
"""Tenants that were served last, at most: room is kept for those of them that ask little."""
_FADES = 0.95
"""What is left of a large request's size with each smaller one that follows: the next may be large again."""


class Guests:
    """`most` blocks are kept at most; a tenant is remembered for `stay_s`. `blocks` are those of guests' grants."""

    def __init__(self, most: int, stay_s: float) -> None:
        self.most = most
        self.blocks = 0
        self._stay_s = stay_s
        self._live: Counter[str] = Counter()
        self._lately: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def tenants(self) -> Counter[str]:
        """Open grants by tenant."""
        return self._live

    def is_guest(self, tenant: str) -> bool:
        """Whether it has nothing here while others have."""
        return bool(self._live) and tenant not in self._live

    def admits(self, blocks: int) -> bool:
        """Whether a guest of `blocks` may take of the room that is kept."""
        return self.blocks + blocks <= self.most

    @property
    def expected(self) -> bool:
        """Whether somebody may come for whom there is room beside what is committed."""
        return self.blocks < self.most and len(self._lately) > 1

    def kept_from(self, tenant: str, now: float) -> int:
        """Blocks that `tenant`, which has something here, must leave: what the others that ask little have taken
        lately (nothing for one that takes more than may be kept), less what guests have of it now."""
        if not self._live[tenant] or len(self._lately) < 2:
            return 0
        kept = sum(
            blocks
            for other, (at, blocks) in self._lately.items()
            if other != tenant and self._live[other] <= 1 and blocks <= self.most and now - at <= self._stay_s
        )
        return max(0, int(min(self.most, kept)) - self.blocks)

    def opened(self, tenant: str, blocks: int, now: float) -> bool:
        """A grant was given; whether it is a guest's."""
        guest = self.is_guest(tenant) and self.admits(blocks)
        self._live[tenant] += 1
        _, before = self._lately.get(tenant, (now, 0.0))
        self._lately[tenant] = (now, max(blocks, _FADES * before))
        self._lately.move_to_end(tenant)
        if len(self._lately) > _REMEMBERED:
            self._lately.popitem(last=False)
        self.blocks += blocks if guest else 0
        return guest

    def ended(self, tenant: str, blocks: int, *, guest: bool) -> None:
        """That grant is closed."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
        self.blocks -= blocks if guest else 0
