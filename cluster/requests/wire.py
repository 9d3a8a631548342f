"""The way from an ingress to one group: its event stream, and submits and aborts in one call per tick.

Knows no request's state: whoever submits is told what became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.requests import moves
from cluster.requests.batcher import Batcher
from cluster.requests.crew import Crew
from cluster.requests.ports import EnginePort
from cluster.requests.subscription import StreamLost, Subscription
from workers.errors import CODE_NO_LEASE
from workers.plan import GroupDead
from workers.sequence import Request

_log = logging.getLogger(__name__)

Tell = Callable[[moves.Event], None]

ABORT_DELAYS_S = (0.1, 0.5, 2.0)
"""Between the tries to abort; after the last only the lease can end what the client has left."""


class Wire:
    """Sends over `subscription`'s port, once that is open."""

    def __init__(self, subscription: Subscription, crew: Crew) -> None:
        self._subscription = subscription
        self._submits: Batcher[tuple[Request, Tell]] = Batcher(crew, self._send_submits)
        self._aborts: Batcher[tuple[str, int]] = Batcher(crew, self._send_aborts)

    @property
    def port(self) -> EnginePort:
        """The way to the group itself."""
        return self._subscription.port

    def submit(self, request: Request, tell: Tell) -> None:
        """`tell` gets Submitted, Rejected or SubmitLost; nothing when the stream is lost, which its user hears of."""
        self._submits.add((request, tell))

    def abort(self, request: str, attempt: int) -> None:
        """End it, if the group runs it."""
        self._aborts.add((request, attempt))

    async def close(self) -> None:
        """Tell the group that this ingress leaves."""
        await self._subscription.close(unsubscribe=True)

    async def _send_submits(self, batch: tuple[tuple[Request, Tell], ...]) -> None:
        subscription = self._subscription
        try:
            await subscription.opened()
            answers = await subscription.port.submit(tuple(request for request, _ in batch))
        except StreamLost:
            return
        except GroupDead:
            subscription.give_up(gone=True)
            return
        except Exception as error:
            _log.warning("a group did not answer a submit: %r", error)
            for request, tell in batch:
                tell(moves.SubmitLost(request.attempt))
            return
        for (request, tell), refused in zip(batch, answers, strict=True):
            if refused is None:
                tell(moves.Submitted(request.attempt))
                continue
            tell(moves.Rejected(request.attempt, refused.code, refused.message))
            if refused.code == CODE_NO_LEASE:
                subscription.give_up(gone=False)

    async def _send_aborts(self, batch: tuple[tuple[str, int], ...]) -> None:
        for delay in (*ABORT_DELAYS_S, None):
            try:
                return await self._subscription.port.abort(batch)
            except GroupDead:
                return self._subscription.give_up(gone=True)
            except Exception as error:
                if delay is None:
                    _log.warning("a group was not told to abort %d requests: %r", len(batch), error)
                    return
            await asyncio.sleep(delay)
