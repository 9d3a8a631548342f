"""What the coordinator's decisions cost without Ray: `place`, `settle` and `report` over groups, requests and sessions.

`tidegate bench coordinator` prints a table and one JSON line. Seconds are of this thread's CPU time: nothing here
waits, and what else the machine does at the time is left out.
"""

from __future__ import annotations

import gc
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from rich.console import Console

from cluster.coordination.cards import GroupCard
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Outcome, Share
from cluster.coordination.terms import CoordinatorTerms, LineBounds
from deploy.tables import plain_table
from kvstore.store import PoolReport
from workers.plan import Finish, GroupReport

T = TypeVar("T")

GROUP_BLOCKS = 1024
BLOCK_SIZE = 32
SLOTS = 64
PROMPT, OUTPUT = 400, 200
"""Tokens of a request."""
_ROOMY = CoordinatorTerms(line=LineBounds(requests=10_000, tokens=1_000_000_000))
"""A line that takes all that are to wait here."""
GROUP_CURVE = (10, 100, 1_000, 4_000)
REQUEST_CURVE = (100, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per call: the median, and the 99th of a hundred. `line` are those who waited at the end."""

    groups: int
    running: int
    sessions: int
    line: int
    place_us: float
    place_p99_us: float
    settle_us: float
    report_us: float
    report_p99_us: float


class Cluster:
    """A coordinator and the groups that it hears of. Every running request has been reported once."""

    def __init__(self, groups: int, running: int, sessions: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.sessions = sessions
        self.now = 0.0
        self.coordinator = Coordinator(_ROOMY, first_epoch=1, seed=seed)
        self.live: dict[str, dict[str, Grant]] = {}
        self.placed: list[Grant] = []
        self._serial = 0
        self._sequence: dict[str, int] = {}
        self._epoch: dict[str, int] = {}
        for number in range(groups):
            name = f"g{number}"
            card = GroupCard(name, ("m",), f"at-{name}", GROUP_BLOCKS, BLOCK_SIZE, SLOTS, 2048, 32_768)
            self._epoch[name] = self.coordinator.join(card, self.now)
            self.live[name] = {}
            self._sequence[name] = 0
        self._tell_sessions()
        for _ in range(running):
            self.take(self.ask())
        for name in self.live:
            self.report(name)

    def ask(self) -> Ask:
        """One that is like a session of earlier, by one of 1,000 tenants."""
        self._serial += 1
        session = self.chance.randrange(max(1, self.sessions))
        key = session.to_bytes(16, "big")
        share = Share(f"tenant{session % 1000}", 1.0, 10_000)
        prompt = self.chance.randrange(1, 2 * PROMPT)
        return Ask(f"r{self._serial}", 0, "m", key, prompt, OUTPUT, share=share, affinity=(key, key[8:]))

    def take(self, ask: Ask) -> None:
        """Place it; its group starts it."""
        (answer,) = self.coordinator.place("i", (ask,), self.now)
        if isinstance(answer, Grant):
            self.started(answer)

    def started(self, grant: Grant) -> None:
        self.live[grant.group][grant.id] = grant
        self.placed.append(grant)

    def outcome(self) -> Outcome:
        """Any running request ends."""
        index = self.chance.randrange(len(self.placed))
        self.placed[index], self.placed[-1] = self.placed[-1], self.placed[index]
        grant = self.placed.pop()
        del self.live[grant.group][grant.id]
        return Outcome(grant.id, Finish.STOP, PROMPT, 0, self.chance.randrange(1, OUTPUT))

    def news(self, name: str) -> GroupReport:
        """What group `name` would report now."""
        self._sequence[name] += 1
        live = self.live[name]
        held = min(GROUP_BLOCKS, sum(grant.blocks for grant in live.values()))
        changed = tuple((self.chance.randrange(max(1, self.sessions)).to_bytes(16, "big"), 9, 300.0) for _ in range(3))
        return GroupReport(
            name,
            self._epoch[name],
            self._sequence[name],
            self._sequence[name],
            PoolReport(GROUP_BLOCKS, GROUP_BLOCKS - held, held, 0, 0, BLOCK_SIZE),
            committed=held,
            running=len(live),
            waiting=0,
            waiting_tokens=0,
            accepted=tuple(live)[-3:],
            live=tuple(live),
            sessions=changed,
        )

    def report(self, name: str) -> None:
        self.coordinator.report(self.news(name), self.now)

    def _tell_sessions(self) -> None:
        """Each session is cached in one group."""
        names = list(self.live)
        rows: dict[str, list[tuple[bytes, int, float]]] = {name: [] for name in names}
        for session in range(self.sessions):
            rows[names[session % len(names)]].append((session.to_bytes(16, "big"), 9, 300.0))
        for name in names:
            self._sequence[name] += 1
            pool = PoolReport(GROUP_BLOCKS, GROUP_BLOCKS, 0, 0, 0, BLOCK_SIZE)
            step = self._sequence[name]
            told = GroupReport(
                name, self._epoch[name], step, step, pool, 0, 0, 0, 0, full=True, sessions=tuple(rows[name])
            )
            self.coordinator.report(told, self.now)


def measure(groups: int, running: int, sessions: int, *, calls: int = 2000, waiting: int = 0, seed: int = 0) -> Row:
    """Costs with so much under way: each call places one request, ends one and takes in one report. `waiting`: so many
    stand in the line as well, for whom there is no room."""
    cluster = Cluster(groups, running, sessions, seed)
    for _ in range(waiting):
        cluster.coordinator.place("i", (_too_big(cluster.ask()),), cluster.now)
    names = list(cluster.live)
    place, settle, report = [], [], []
    gc.collect()
    gc.freeze()  # the collector's full passes over what a service keeps for long are not what a call costs
    for number in range(calls):
        cluster.now += 0.001
        ask = cluster.ask()
        seconds, (answer,) = _timed(partial(cluster.coordinator.place, "i", (ask,), cluster.now))
        place.append(seconds)
        if isinstance(answer, Grant):
            cluster.started(answer)
        ended = (cluster.outcome(),)
        settle.append(_timed(partial(cluster.coordinator.settle, ended, cluster.now))[0])
        told = cluster.news(names[number % len(names)])
        report.append(_timed(partial(cluster.coordinator.report, told, cluster.now))[0])
        if number % 250 == 0:
            cluster.coordinator.tick(cluster.now)
    gc.unfreeze()
    return Row(
        groups,
        running,
        sessions,
        cluster.coordinator.waiting,
        *(_micro(place, 0.5), _micro(place, 0.99), _micro(settle, 0.5), _micro(report, 0.5), _micro(report, 0.99)),
    )


def memory(groups: int, running: int, sessions: int) -> float:
    """MiB that the coordinator takes, and the asks and grants that it keeps."""
    gc.collect()
    tracemalloc.start()
    cluster = Cluster(groups, running, sessions)
    cluster.live, cluster.placed = {}, []
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cluster.coordinator is not None
    return used / 2**20


def curves(*, calls: int = 2000) -> list[Row]:
    """The aim's size first (1,000 groups, 10,000 running, 100,000 sessions), with a full line too; then by groups, then
    by running requests."""
    rows = [measure(1_000, 10_000, 100_000, calls=calls), measure(1_000, 10_000, 100_000, calls=calls, waiting=1_000)]
    rows += [measure(groups, 10 * groups, 10_000, calls=calls) for groups in GROUP_CURVE]
    return rows + [measure(1_000, running, 10_000, calls=calls) for running in REQUEST_CURVE]


def show(*, calls: int = 2000, as_json: bool = False) -> None:
    """Measure and print: a table, unless only JSON is wanted, and one JSON line."""
    rows = curves(calls=calls)
    used = memory(1_000, 10_000, 100_000)
    columns = ("groups", "running", "sessions", "line", "place p50", "p99", "settle p50", "report p50", "p99")
    table = plain_table("Coordinator, microseconds per call", *columns)
    for row in rows:
        values = (row.place_us, row.place_p99_us, row.settle_us, row.report_us, row.report_p99_us)
        counts = (row.groups, row.running, row.sessions, row.line)
        table.add_row(*(f"{count:,}" for count in counts), *(f"{value:.0f}" for value in values))
    if not as_json:
        console = Console()
        console.print(table)
        console.print(f"Memory with 1,000 groups, 10,000 running, 100,000 sessions: {used:.0f} MiB")
    print(json.dumps({"benchmark": "coordinator", "memory_mib": round(used, 1), "rows": [asdict(row) for row in rows]}))


def _too_big(ask: Ask) -> Ask:
    """It needs a whole group, and none is empty."""
    return Ask(ask.request, 0, "m", ask.namespace, PROMPT, 32_768 - PROMPT, share=ask.share)


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def _micro(seconds: Sequence[float], quantile: float) -> float:
    return round(1e6 * sorted(seconds)[int(quantile * (len(seconds) - 1))], 1)
