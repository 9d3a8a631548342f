"""Door: which requests come in. By a grant, once and while it is good; without one, if there is visibly room.

No lock of its own: the engine's guards it. Knows neither sequences nor steps.
"""

from __future__ import annotations

from workers.errors import CODE_DRAINING, CODE_DUPLICATE, CODE_FULL, CODE_NO_LEASE, CODE_VOID, EngineRefused
from workers.grants import GrantBook
from workers.sequence import Request
from workers.subscribers import Key, Subscribers


class Door:
    """Of the group `name` with a pool of `total` blocks.

    The forecast of the group's blocks belongs to the step thread and is made now and then (`update`); what was accepted
    since counts with what it may need. `knocked`: somebody found no room by that forecast, so that a new one is due.
    """

    def __init__(self, name: str, total: int, subscribers: Subscribers) -> None:
        self.grants = GrantBook()
        self.draining = False
        self.knocked = False
        self._name = name
        self._total = total
        self._subscribers = subscribers
        self._forecast = 0
        self._on_the_way: dict[Key, int] = {}
        self._started = 0

    def enter(self, ingress: str, request: Request, blocks: int, slots: int) -> None:
        """Accept a request that needs up to `blocks` in a group with `slots`, or raise EngineRefused."""
        key = (request.id, request.attempt)
        if self.draining:
            raise EngineRefused(CODE_DRAINING, f"group {self._name} is draining")
        if ingress not in self._subscribers:
            raise EngineRefused(CODE_NO_LEASE, f"ingress {ingress} has no lease on group {self._name}")
        if self._subscribers.is_live(key) or self.grants.accepted(request.grant, key):
            raise EngineRefused(CODE_DUPLICATE, f"request {request.id} attempt {request.attempt} was accepted before")
        if self.grants.is_void(request.grant):
            raise EngineRefused(CODE_VOID, f"the grant of request {request.id} has expired")
        if not request.grant and not self._has_room(blocks, slots):
            self.knocked = True
            raise EngineRefused(CODE_FULL, f"group {self._name} has no room for {blocks} blocks without a grant")
        self._subscribers.accept(ingress, key)
        self.grants.accept(request.grant, key)
        self._on_the_way[key] = blocks

    def start(self, key: Key) -> None:
        """The step thread has it: the next forecast will count it."""
        self._started += self._on_the_way.pop(key, 0)

    def update(self, forecast: int) -> None:
        """`forecast` blocks are what the started requests will hold at most."""
        self._forecast, self._started, self.knocked = forecast, 0, False

    def end(self, key: Key) -> None:
        """The request has ended."""
        self._subscribers.end(key)
        self.grants.end(key)

    def _has_room(self, blocks: int, slots: int) -> bool:
        """A lone request may have the whole group."""
        live = self._subscribers.requests
        taken = self._forecast + self._started + sum(self._on_the_way.values())
        return not live or (live < slots and taken + blocks <= self._total)
