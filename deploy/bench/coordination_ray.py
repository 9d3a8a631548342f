"""What the coordinator's actor costs: place+settle pairs per second over Ray, beside an actor whose methods do nothing.

Both run in the same minute on the same machine and get the same messages; they take turns, so that what else the
machine does hits both. `tidegate bench pairs` prints a table and one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from cluster.actors import CoordinatorActor
from cluster.coordination.cards import GroupCard
from cluster.coordination.grants import Ask, Grant, Outcome
from cluster.links import CoordinatorLink
from cluster.settings import CoordinatorSettings
from deploy.cluster import start_ray, stop_ray
from kvstore.store import PoolReport
from workers.plan import Finish, GroupReport

CALLERS = 32
"""Place calls under way at a time: enough that the actor never waits for us."""
REPORT_S = 1.0
PROMPT, OUTPUT = 512, 128


@dataclass(frozen=True, slots=True)
class Figure:
    """Of asks sent `batch` at a time: place+settle pairs per second of the coordinator (the median round), the same of
    the empty actor, `share` of the one in the other (the median of the rounds' own), and asks that got no grant."""

    batch: int
    pairs: float
    empty_pairs: float
    share: float
    refused: int


@ray.remote(num_cpus=0, concurrency_groups={"place": 256, "report": 256})
class EmptyActor:
    """Takes the same messages and answers nothing."""

    @ray.method(concurrency_group="place")
    async def place(self, ingress: str, asks: tuple[Ask, ...]) -> None:
        """Nothing."""

    @ray.method(concurrency_group="report")
    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        """Nothing."""


class Fleet:
    """Groups that exist as cards and reports only. `link` leads to their coordinator."""

    def __init__(self, link: CoordinatorLink, cards: Sequence[GroupCard]) -> None:
        self._link = link
        self._cards = cards
        self._epochs: list[int] = []
        self._sequence = 0

    async def join(self) -> None:
        """All of them join."""
        self._epochs = [await self._link.join(card) for card in self._cards]

    async def report(self, **fields: Any) -> None:
        """Each says that it has nothing to do, and `fields`."""
        self._sequence += 1
        for card, epoch in zip(self._cards, self._epochs, strict=True):
            pool = PoolReport(card.blocks, card.blocks, 0, 0, 0, card.block_size)
            own: dict[str, Any] = {"full": True, **fields}
            await self._link.report(
                GroupReport(card.group, epoch, self._sequence, self._sequence, pool, 0, 0, 0, 0, **own)
            )

    async def keep_reporting(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)


def measure(*, seconds: float, rounds: int, groups: int, batches: Sequence[int]) -> list[Figure]:
    """One figure per batch size; `rounds` turns of `seconds` each for either actor. Needs a connection to Ray."""
    real_actor: Any = CoordinatorActor
    empty_actor: Any = EmptyActor
    settings = CoordinatorSettings("benchmark", "benchmark")
    coordinator, empty = real_actor.remote(settings), empty_actor.remote()
    try:
        link = CoordinatorLink(settings, "ingress", coordinator)
        return asyncio.run(_measure(link, coordinator, empty, seconds, rounds, groups, batches))
    finally:
        ray.kill(coordinator)
        ray.kill(empty)


async def _measure(
    link: CoordinatorLink,
    coordinator: Any,
    empty: Any,
    seconds: float,
    rounds: int,
    groups: int,
    batches: Sequence[int],
) -> list[Figure]:
    fleet = Fleet(link, [_card(number) for number in range(groups)])
    await fleet.join()
    reports = asyncio.create_task(fleet.keep_reporting())
    try:
        serial, figures = 0, []
        for batch in batches:
            drives = []
            for turn in range(rounds + 1):
                for target in (coordinator, empty):
                    drive = _Drive(target, batch, serial)
                    await drive.run(seconds if turn else min(0.5, seconds))  # the first turn warms up
                    serial = drive.serial
                    drives.append(drive)
                    if reports.done():
                        reports.result()  # groups that nobody reports for get nothing: say why
            figures.append(_figure(batch, drives[2::2], drives[3::2]))
        return figures
    finally:
        reports.cancel()
        await asyncio.wait([reports])


class _Drive:
    """One turn: CALLERS clients, each placing and settling `batch` at a time."""

    def __init__(self, target: Any, batch: int, serial: int) -> None:
        self.serial = serial
        self.rate = 0.0
        self.refused = 0
        self._target = target
        self._batch = batch
        self._pairs = 0

    async def run(self, seconds: float) -> None:
        began = time.perf_counter()
        await asyncio.gather(*(self._client(began + seconds) for _ in range(CALLERS)))
        self.rate = self._pairs / (time.perf_counter() - began)

    async def _client(self, until: float) -> None:
        while time.perf_counter() < until:
            asks = tuple(self._ask() for _ in range(self._batch))
            answers = await self._target.place.remote("ingress", asks)
            if answers is None:
                names = [ask.request for ask in asks]
            else:
                names = [answer.id for answer in answers if isinstance(answer, Grant)]
                self.refused += len(asks) - len(names)
            await self._target.settle.remote(tuple(Outcome(n, Finish.LENGTH, PROMPT, 0, OUTPUT) for n in names))
            self._pairs += len(names)

    def _ask(self) -> Ask:
        self.serial += 1
        return Ask(f"r{self.serial}", 0, "m", b"namespace %d" % (self.serial % 64), PROMPT, OUTPUT)


def _card(number: int) -> GroupCard:
    return GroupCard(f"g{number}", ("m",), f"at-g{number}", 65536, 16, 4096, 1_000_000, 65536)


def _figure(batch: int, drives: Sequence[_Drive], empties: Sequence[_Drive]) -> Figure:
    shares = [drive.rate / empty.rate for drive, empty in zip(drives, empties, strict=True)]
    return Figure(
        batch,
        round(statistics.median(drive.rate for drive in drives), 1),
        round(statistics.median(drive.rate for drive in empties), 1),
        round(statistics.median(shares), 3),
        sum(drive.refused for drive in drives),
    )


def show(
    *,
    seconds: float = 2.0,
    rounds: int = 5,
    groups: int = 64,
    batches: Sequence[int] = (1, 8, 64),
    as_json: bool = False,
) -> None:
    """Start a Ray of its own on this machine, measure, print: a table, unless only JSON is wanted, and a JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        link = start_ray(Path(folder) / "token", haproxy=False)
        try:
            figures = measure(seconds=seconds, rounds=rounds, groups=groups, batches=batches)
        finally:
            stop_ray(link)
    table = Table("batch", "pairs/s", "empty actor", "share", title="place+settle over Ray", title_justify="left")
    for figure in figures:
        row = (f"{figure.pairs:,.0f}", f"{figure.empty_pairs:,.0f}", f"{figure.share:.2f}")
        table.add_row(str(figure.batch), *row)
    if not as_json:
        Console().print(table)
    print(json.dumps({"benchmark": "pairs", "groups": groups, "figures": list(map(asdict, figures))}))
