"""GroupOwner: a Serve deployment whose replica owns one tensor-parallel group: builds it, watches it, rebuilds it when
a rank has died, reports for it, drains it.

Serve gives it a place (a placement group); the ranks fill it. Requests never pass here: ingresses talk to rank 0. Knows
no request and no token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cluster.autopsy import write_autopsy
from cluster.bundles import Resources
from cluster.coordination.cards import Reply
from cluster.departure import seconds_left
from cluster.incarnation import CannotStart, Incarnation, NoProgress, reason
from cluster.links import CoordinatorLink
from cluster.loopback import keep_on_loopback
from cluster.settings import CoordinatorSettings
from workers.loglevel import set_log_level
from workers.orders import Orders
from workers.plan import GroupDead, GroupReport
from workers.settings import GroupSettings

BEAT_S = 0.5
"""Until the next report where the coordinator has not said when it is due."""
REBUILDS = 2
"""How often in a row rebuilding is tried before Serve is told that this replica is broken."""
CALL_S = 5.0
"""How long the coordinator may take for a call; a group never waits longer for it."""
HANDOVER_S = 5.0
"""So long before its node goes a group ends what still runs. Replayed then, it costs its client hardly a pause; once
the node has gone, as long as it takes to be missed."""
JOIN_REST_S = 0.5
_IDLE_LOOK_S = 0.1
_UNREACHABLE = (ConnectionError, TimeoutError)

log = logging.getLogger("ray.serve")


class GroupOwner:
    """One replica, one group. `coordinator` says whom to report to; `bundles` are those of its place; running requests
    get `drain_s` seconds to end when the replica is stopped, less where its node goes before."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: GroupSettings,
        coordinator: CoordinatorSettings,
        bundles: Sequence[Resources],
        drain_s: float,
    ) -> None:
        keep_on_loopback()
        self._settings = settings
        self._bundles = bundles
        self._drain_s = drain_s
        self._name = serve.get_replica_context().replica_id.unique_id
        self._service = coordinator.service
        self._serial = 0
        self._restarts = -1
        self._epoch = 0
        self._closing = asyncio.Event()
        self._joining = asyncio.Lock()
        self._fresh = asyncio.Event()
        self._broken: str | None = None
        self._log_level = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._incarnation: Incarnation | None = None
        self._coordinator = await CoordinatorLink.open(coordinator)
        try:
            await self._begin()
        except CannotStart as error:
            await self._try(self._coordinator.notice(self._name, str(error), True))
            raise RuntimeError(f"group {self._name} cannot start: {error}") from None
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._beat())]
        for task in self._tasks:
            task.add_done_callback(self._notice_end)

    async def check_health(self) -> None:
        """Serve asks: broken only when rebuilding has failed; busy rebuilding is healthy."""
        if self._broken:
            raise RuntimeError(f"group {self._name} cannot be rebuilt: {self._broken}")

    async def __del__(self) -> None:
        """Serve's last call: take nothing new, let running requests end for a bounded time, end the ranks."""
        self._closing.set()
        if self._incarnation is None:
            return
        await self._try(self._coordinator.leave(self._name, self._epoch, replaced=True))
        await self._drain(self._incarnation)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._incarnation.stop()

    async def _begin(self) -> None:
        """A new incarnation, known to the coordinator under a new epoch."""
        place = ray.util.get_current_placement_group()
        if place is None:
            raise CannotStart("this replica has no placement group")
        self._serial += 1
        name = f"{self._service}-{self._name}-{self._serial}"
        incarnation = await Incarnation.start(
            self._name, name, self._settings, place, self._bundles, self._say, restarts=self._restarts + 1
        )
        log.info("group %s computes with %s", self._name, incarnation.card.kernels)
        try:
            await self._enter(incarnation)
        except BaseException:
            incarnation.kill()
            raise
        await self._say("ready")

    async def _enter(self, incarnation: Incarnation) -> None:
        """The coordinator takes it, as soon as there is one; from then on it is reported for."""
        while True:
            try:
                async with self._joining:
                    await self._join(incarnation)
                    self._incarnation = incarnation
                self._restarts += 1
                return self._fresh.set()
            except _UNREACHABLE as error:
                log.warning("group %s cannot join yet: %s", self._name, error)
                await asyncio.sleep(JOIN_REST_S)

    async def _join(self, incarnation: Incarnation) -> None:
        self._epoch = await asyncio.wait_for(self._coordinator.join(incarnation.card), CALL_S)
        await incarnation.enter(self._epoch)

    async def _say(self, text: str) -> None:
        await self._try(self._coordinator.notice(self._name, text, False))

    async def _supervise(self) -> None:
        """Replace the incarnation whenever it ends by itself."""
        while not self._broken:
            incarnation = self._incarnation
            assert incarnation is not None
            why = await incarnation.end()
            if self._closing.is_set():
                return
            log.error("group %s is dead and will be rebuilt: %s", self._name, why)
            await asyncio.gather(
                self._try(self._coordinator.leave(self._name, self._epoch)), self._record(incarnation, why)
            )
            incarnation.kill()
            await self._rebuild()

    async def _record(self, incarnation: Incarnation, why: str) -> None:
        """Write down where the ranks were, while they can still say it."""
        ranks, recording = await incarnation.examine()
        facts = {"why": why, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "group": self._name, "epoch": self._epoch}
        folder = Path(self._settings.flight_dir or ray._private.worker._global_node.get_logs_dir_path())
        try:
            path = await asyncio.to_thread(write_autopsy, folder, incarnation.name, facts, ranks, recording)
            log.error("group %s: stacks and the last plans are in %s", self._name, path)
        except OSError as error:
            log.error("group %s: stacks and the last plans could not be written: %s", self._name, error)

    def _notice_end(self, task: asyncio.Task[None]) -> None:
        """Supervision itself must not end unnoticed: Serve shall replace this replica then."""
        if not task.cancelled() and (error := task.exception()):
            self._broken = f"its supervision failed: {error!r}"
            log.error("group %s: supervision failed", self._name, exc_info=error)

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
            self._fresh.clear()
            incarnation = self._incarnation
            assert incarnation is not None
            if incarnation is not reported:
                reported, reply, full = incarnation, Reply(True, 0), True
            rest = BEAT_S
            try:
                report = await incarnation.report(reply.limits, reply.void, full, reply.orders)
                full = True  # until the coordinator has taken this one
                reply = await self._report(report)
                full, rest = not reply.known, reply.beat_s
                self._carry_out(reply.orders, incarnation)
                if not reply.known:
                    await self._join_again(incarnation, reply)
            except NoProgress as error:
                incarnation.give_up(str(error))
            except (*_UNREACHABLE, RayError, GroupDead) as error:
                log.debug("no report of group %s: %s", self._name, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), rest)

    def _carry_out(self, orders: Orders | None, incarnation: Incarnation) -> None:
        """What concerns the owner; the rest goes to the engine with the next report."""
        if orders is None:
            return
        if orders.terms.log_level != self._log_level:
            self._log_level = orders.terms.log_level
            set_log_level(self._log_level)
            incarnation.log_level(self._log_level)
        if orders.rebuild and not self._closing.is_set():
            incarnation.give_up("an operator wants it built anew")

    async def _report(self, report: GroupReport) -> Reply:
        return await asyncio.wait_for(self._coordinator.report(report), CALL_S)

    async def _join_again(self, incarnation: Incarnation, reply: Reply) -> None:
        """The coordinator has forgotten this group, or was restarted."""
        async with self._joining:
            current = incarnation is self._incarnation and reply.epoch <= self._epoch
            if current and not self._closing.is_set():
                await self._join(incarnation)

    async def _drain(self, incarnation: Incarnation) -> None:
        async def until_idle() -> None:
            while not await incarnation.drain():
                await asyncio.sleep(_IDLE_LOOK_S)

        within = await self._drain_within()
        try:
            await asyncio.wait_for(until_idle(), within)
        except TimeoutError:
            log.warning("group %s: requests still running after %.0f s are cut off", self._name, within)
        except RayError as error:
            log.warning("group %s died while it drained: %s", self._name, reason(error))

    async def _drain_within(self) -> float:
        try:
            left = await asyncio.to_thread(seconds_left)
        except RayError as error:
            log.warning("group %s cannot tell whether its node goes: %s", self._name, error)
            left = None
        return self._drain_s if left is None else max(0.0, min(self._drain_s, left - HANDOVER_S))

    async def _try(self, call: Awaitable[Any]) -> None:
        """A call to the coordinator that may be lost: reports set it right later."""
        try:
            await asyncio.wait_for(call, CALL_S)
        except (*_UNREACHABLE, RayError) as error:
            log.warning("group %s cannot reach the coordinator: %s", self._name, error)
