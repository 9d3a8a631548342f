"""The owner of a group over ranks and a coordinator that are objects of the test: no Ray, no Serve, no process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import group as owner_module
from cluster.coordination.cards import GroupCard, Reply
from cluster.group import GroupOwner
from cluster.incarnation import NoProgress
from cluster.settings import CoordinatorSettings
from kvstore.store import PoolReport
from workers.orders import Orders
from workers.plan import GroupReport, Limits
from workers.settings import GroupSettings
from workers.stacks import RankState, ThreadStack


@dataclass
class FakeIncarnation:
    """Lives until it is told otherwise."""

    name: str
    card: GroupCard
    hangs: bool = False
    busy: bool = False
    reports: list[tuple[Limits | None, tuple[str, ...], bool]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    orders: list[Orders | None] = field(default_factory=list)
    log_levels: list[str] = field(default_factory=list)
    killed: bool = False
    stopped: bool = False
    _end: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def end(self) -> str:
        return await asyncio.shield(self._end)

    def die(self, why: str = "a rank died") -> None:
        if not self._end.done():
            self._end.set_result(why)

    give_up = die

    def log_level(self, level: str) -> None:
        self.log_levels.append(level)

    async def examine(self) -> tuple[tuple[RankState | str, ...], str]:
        stack = ThreadStack("work", ("parallel.py:3 all_reduce: wait()",))
        return (RankState(0, 7, 12, 1, 99, "all_reduce", (stack,)), "no answer"), '{"kind": "plan"}\n'

    async def enter(self, epoch: int) -> None:
        self.entered.append(epoch)

    async def report(
        self, limits: Limits | None, void: Sequence[str], full: bool, orders: Orders | None = None
    ) -> GroupReport:
        self.orders.append(orders)
        if self.hangs:
            raise NoProgress("no step ended within 60 s")
        self.reports.append((limits, tuple(void), full))
        epoch = self.entered[-1]
        return GroupReport(self.card.group, epoch, len(self.reports), 1, PoolReport(8, 8, 0, 0, 0, 16), 0, 0, 0, 0)

    async def drain(self) -> bool:
        return not self.busy

    async def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True
        self.die()


@dataclass
class FakeCoordinator:
    """Takes everything; `away` makes every call fail the given way."""

    reply: Callable[[GroupReport], Reply] = lambda report: Reply(True, report.epoch)
    away: Callable[[], Awaitable[Any]] | None = None
    joined: list[GroupCard] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    heard: list[GroupReport] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    replaced: bool = False

    async def _reach(self) -> None:
        if self.away:
            await self.away()

    async def join(self, card: GroupCard) -> int:
        await self._reach()
        self.joined.append(card)
        return len(self.joined)

    async def leave(self, group: str, epoch: int, *, replaced: bool = False) -> None:
        await self._reach()
        self.left.append(epoch)
        self.replaced = replaced

    async def report(self, report: GroupReport) -> Reply:
        await self._reach()
        self.heard.append(report)
        return self.reply(report)

    async def notice(self, group: str, text: str, failed: bool) -> None:
        await self._reach()
        self.said.append(text)


class Owner(GroupOwner):
    """Serve awaits `__del__`; the garbage collector would not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@dataclass
class Bench:
    owner: GroupOwner
    coordinator: FakeCoordinator
    started: list[FakeIncarnation]
    failures: list[Exception]
    folder: Path

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not what():
                await asyncio.sleep(0.002)

    def flights(self) -> list[list[dict[str, Any]]]:
        files = sorted(self.folder.glob("*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


@asynccontextmanager
async def bench(
    monkeypatch: pytest.MonkeyPatch, folder: Path, coordinator: FakeCoordinator | None = None
) -> AsyncIterator[Bench]:
    coordinator = coordinator or FakeCoordinator()
    started: list[FakeIncarnation] = []
    failures: list[Exception] = []

    async def start(group: str, name: str, *_: Any, restarts: int) -> FakeIncarnation:
        if failures:
            raise failures.pop(0)
        card = GroupCard(group, ("m",), f"{name}-rank0", 8, 16, 4, 64, 128, restarts=restarts)
        started.append(FakeIncarnation(name, card))
        return started[-1]

    async def open_link(settings: CoordinatorSettings) -> FakeCoordinator:
        return coordinator

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(owner_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(owner_module.ray.util, "get_current_placement_group", lambda: object())
    monkeypatch.setattr(owner_module, "keep_on_loopback", lambda: None)
    monkeypatch.setattr(owner_module, "seconds_left", lambda: None)
    monkeypatch.setattr(owner_module.Incarnation, "start", start)
    monkeypatch.setattr(owner_module.CoordinatorLink, "open", open_link)
    for name, seconds in {"BEAT_S": 0.02, "JOIN_REST_S": 0.01, "CALL_S": 0.05}.items():
        monkeypatch.setattr(owner_module, name, seconds)
    settings = GroupSettings("folder", ("m",), flight_dir=str(folder))
    owner: Any = Owner.__new__(Owner)
    await owner.__init__(settings, CoordinatorSettings("svc", "c"), [{"CPU": 0.01}, {"CPU": 1.0}], 1.0)
    try:
        yield Bench(owner, coordinator, started, failures, folder)
    finally:
        await GroupOwner.__del__(owner)
