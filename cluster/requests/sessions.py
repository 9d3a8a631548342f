"""What clients may know and do about their sessions' caches: where something of one is, and that it be forgotten.

Forgotten means that every group has said so, or is dead for certain. Knows how no namespace is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.coordination.cards import GroupState, SessionCopy
from cluster.errors import ApiError
from cluster.requests.directory import Directory
from cluster.requests.ports import CoordinatorPort, EnginePort
from workers.plan import GroupDead

_log = logging.getLogger(__name__)

PURGE_S = 10.0
"""How long a group may take to confirm: it does so between two steps."""


class SessionDesk:
    """`engine` gives the port to the group at an address, `namespaces` those of a (tenant, session), under every model
    and secret."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        directory: Directory,
        engine: Callable[[str], EnginePort],
        namespaces: Callable[[str, str], tuple[bytes, ...]],
    ) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._engine = engine
        self._namespaces = namespaces

    async def session(self, tenant: str, session: str) -> tuple[SessionCopy, ...]:
        """What the groups have reported of it. ApiError when the coordinator does not answer."""
        try:
            return await self._coordinator.session(self._namespaces(tenant, session))
        except Exception as error:
            _log.warning("a session cannot be looked up: %r", error)
            raise ApiError("The coordinator does not answer: try again.", "not_ready", retry_after=1.0) from error

    async def forget(self, tenant: str, session: str) -> int:
        """Forget and zero it everywhere; returns the blocks. ApiError "not_confirmed" when some group may still have
        it; forgetting again does no harm."""
        namespaces = self._namespaces(tenant, session)
        try:
            groups = await self._directory.groups()
        except Exception as error:
            _log.warning("the groups to purge are not known: %r", error)
            raise _not_confirmed("the coordinator does not answer") from error
        blocks = await asyncio.gather(*(self._purge(group, namespaces) for group in groups))
        silent = sum(count is None for count in blocks)
        if silent:
            raise _not_confirmed(f"{silent} of {len(groups)} groups did not answer")
        return sum(count for count in blocks if count is not None)

    async def _purge(self, group: GroupState, namespaces: tuple[bytes, ...]) -> int | None:
        """The blocks of one group, None when it has not confirmed. What is dead has nothing left."""
        port, blocks = self._engine(group.card.address), 0
        try:
            async with asyncio.timeout(PURGE_S):
                for namespace in namespaces:
                    blocks += await port.purge(namespace)
                return blocks
        except GroupDead:
            return 0
        except Exception as error:
            _log.warning("group %s did not confirm a purge: %r", group.card.group, error)
            return None


def _not_confirmed(reason: str) -> ApiError:
    message = f"Not every group has confirmed that the session is forgotten: {reason}. Try again."
    return ApiError(message, "not_confirmed", retry_after=1.0)
