"""What the coordinator must hear of an ingress: how grants ended, which were not used, who has left the line.

Batched per tick and said again when a call fails, but not for ever: a coordinator that was away learns it from the
groups' reports, or by its own deadlines. Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.coordination.grants import Outcome
from cluster.requests.batcher import Batcher
from cluster.requests.crew import Crew
from cluster.requests.ports import CoordinatorPort

_log = logging.getLogger(__name__)

DELAYS_S = (0.2, 0.5, 1.0, 2.0)
"""Between the tries."""
KEPT = 4096
"""Grants whose end was told last: an answer that comes twice, or by two ways, may name one again."""


class Outgoing:
    """Sends as tasks of `crew`."""

    def __init__(self, coordinator: CoordinatorPort, crew: Crew) -> None:
        self._coordinator = coordinator
        self._settles: Batcher[Outcome] = Batcher(crew, self._send_settles)
        self._withdrawals: Batcher[str] = Batcher(crew, self._send_withdrawals)
        self._leaves: Batcher[tuple[str, int]] = Batcher(crew, self._send_leaves)
        self._closed: dict[str, None] = {}  # oldest first

    def settle(self, outcome: Outcome) -> None:
        """A grant has ended."""
        self._close(outcome.grant)
        self._settles.add(outcome)

    def withdraw(self, grant: str) -> None:
        """A grant will not be used. One whose end was told already is not told again."""
        if self._close(grant):
            self._withdrawals.add(grant)

    def leave(self, request: str, attempt: int) -> None:
        """This attempt waits no more."""
        self._leaves.add((request, attempt))

    def _close(self, grant: str) -> bool:
        """Whether it was open, as far as is known here."""
        if grant in self._closed:
            return False
        self._closed[grant] = None
        if len(self._closed) > KEPT:
            del self._closed[next(iter(self._closed))]
        return True

    async def _send_settles(self, batch: tuple[Outcome, ...]) -> None:
        await _insist(lambda: self._coordinator.settle(batch))

    async def _send_withdrawals(self, batch: tuple[str, ...]) -> None:
        await _insist(lambda: self._coordinator.withdraw(batch))

    async def _send_leaves(self, batch: tuple[tuple[str, int], ...]) -> None:
        await _insist(lambda: self._coordinator.leave_line(batch))


async def _insist(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for delay in (*DELAYS_S, None):
        try:
            return await call()
        except Exception as error:
            if delay is None:
                _log.warning("the coordinator was not told what became of requests: %r", error)
                return
        await asyncio.sleep(delay)
