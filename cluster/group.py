"""GroupOwner: a Serve deployment whose replica owns one tensor-parallel group: builds it, watches it, rebuilds it when
a rank has died, reports for it, drains it.

Serve gives it a place (a placement group); the ranks fill it. Requests never pass here: ingresses talk to rank 0. Knows
no request and no token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cluster.bundles import Resources
from cluster.coordination.cards import Reply
from cluster.incarnation import CannotStart, Incarnation, reason
from cluster.links import CoordinatorLink
from cluster.loopback import keep_on_loopback
from workers.plan import GroupDead
from workers.settings import GroupSettings

BEAT_S = 0.5
"""Between two reports to the coordinator."""
REBUILDS = 2
"""How often in a row rebuilding is tried before Serve is told that this replica is broken."""
_IDLE_LOOK_S = 0.1

log = logging.getLogger("ray.serve")


class GroupOwner:
    """One replica, one group. `service` and `config` say which coordinator; `bundles` are those of its place; running
    requests get `drain_s` seconds to end when the replica is stopped."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: GroupSettings, service: str, config: str, bundles: Sequence[Resources], drain_s: float
    ) -> None:
        keep_on_loopback()
        self._settings = settings
        self._bundles = bundles
        self._drain_s = drain_s
        self._name = serve.get_replica_context().replica_id.unique_id
        self._serial = 0
        self._epoch = 0
        self._closing = asyncio.Event()
        self._broken: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._incarnation: Incarnation | None = None
        self._coordinator = await CoordinatorLink.open(service, config)
        self._service = service
        try:
            await self._begin()
        except CannotStart as error:
            await self._coordinator.notice(self._name, str(error), True)
            raise RuntimeError(f"group {self._name} cannot start: {error}") from None
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._beat())]

    async def check_health(self) -> None:
        """Serve asks: broken only when rebuilding has failed; busy rebuilding is healthy."""
        if self._broken:
            raise RuntimeError(f"group {self._name} cannot be rebuilt: {self._broken}")

    async def __del__(self) -> None:
        """Serve's last call: take nothing new, let running requests end for a bounded time, end the ranks."""
        self._closing.set()
        if self._incarnation is None:
            return
        await self._try(self._coordinator.leave(self._name, self._epoch))
        await self._drain(self._incarnation)
        for task in self._tasks:
            task.cancel()
        await self._incarnation.stop()

    async def _begin(self) -> None:
        """A new incarnation, known to the coordinator under a new epoch."""
        place = ray.util.get_current_placement_group()
        if place is None:
            raise CannotStart("this replica has no placement group")
        self._serial += 1
        name = f"{self._service}-{self._name}-{self._serial}"
        incarnation = await Incarnation.start(self._name, name, self._settings, place, self._bundles, self._say)
        await self._join(incarnation)
        self._incarnation = incarnation  # from here on it is reported for
        await self._say("ready")

    async def _join(self, incarnation: Incarnation) -> None:
        self._epoch = await self._coordinator.join(incarnation.card)
        await incarnation.enter(self._epoch)

    async def _say(self, text: str) -> None:
        await self._try(self._coordinator.notice(self._name, text, False))

    async def _supervise(self) -> None:
        """Replace the incarnation whenever it ends by itself."""
        while not self._broken:
            incarnation = self._incarnation
            assert incarnation is not None
            ended = await incarnation.end()
            if self._closing.is_set():
                return
            why = reason(ended) if ended else "a rank stopped"
            log.error("group %s is dead and will be rebuilt: %s", self._name, why)
            await self._try(self._coordinator.leave(self._name, self._epoch))
            incarnation.kill()
            await self._rebuild()

    async def _rebuild(self) -> None:
        failure = ""
        for _ in range(REBUILDS):
            try:
                return await self._begin()
            except (CannotStart, RayError) as error:
                failure = str(error)
                log.error("group %s could not be rebuilt: %s", self._name, failure)
        self._broken = failure
        await self._try(self._coordinator.notice(self._name, failure, True))

    async def _beat(self) -> None:
        """Carry reports up and replies down, whatever goes wrong on either side."""
        reported, reply, full = self._incarnation, Reply(True, 0), True
        while not self._broken:
            incarnation = self._incarnation
            assert incarnation is not None
            if incarnation is not reported:
                reported, reply, full = incarnation, Reply(True, 0), True
            try:
                report = await incarnation.report(reply.limits, reply.void, full)
                full = True  # until the coordinator has taken this one
                reply = await self._coordinator.report(report)
                full = not reply.known
                if not reply.known:
                    await self._join_again(incarnation, reply)
            except TimeoutError:
                log.error("group %s does not advance; its ranks are ended", self._name)
                incarnation.kill()
            except (RayError, ConnectionError, GroupDead) as error:
                log.debug("no report of group %s: %s", self._name, error)
            await asyncio.sleep(BEAT_S)

    async def _join_again(self, incarnation: Incarnation, reply: Reply) -> None:
        """The coordinator has forgotten this group, or was restarted."""
        current = incarnation is self._incarnation and reply.epoch <= self._epoch
        if current and not self._closing.is_set():
            await self._join(incarnation)

    async def _drain(self, incarnation: Incarnation) -> None:
        async def until_idle() -> None:
            while not await incarnation.drain():
                await asyncio.sleep(_IDLE_LOOK_S)

        try:
            await asyncio.wait_for(until_idle(), self._drain_s)
        except TimeoutError:
            log.warning("group %s: requests still running after %.0f s are cut off", self._name, self._drain_s)
        except RayError as error:
            log.warning("group %s died while it drained: %s", self._name, reason(error))

    async def _try(self, call: Awaitable[Any]) -> None:
        """A call to the coordinator that may be lost: reports set it right later."""
        try:
            await call
        except (RayError, ConnectionError) as error:
            log.warning("group %s cannot reach the coordinator: %s", self._name, error)
