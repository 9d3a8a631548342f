"""Plays a contest: starts its servers in turn, A B A B …, each time anew, and puts the same loads on each.

A process gets other pages, and a machine other neighbours, each time: only medians over several starts, taken in turns,
can be compared. Knows how loads are timed (`deploy.bench.load`) and nothing of how a server works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from deploy.bench.busy import cores, family
from deploy.bench.contest import Contender, Contest
from deploy.bench.figures import Figures
from deploy.bench.load import Load, client_of, measure
from deploy.bench.probe import summary
from deploy.bench.servers import StartedServer, counters
from deploy.bench.standings import Turn
from deploy.terminal import Tick

Look = Callable[[], Mapping[str, Any]]
Watch = Callable[[str], AbstractContextManager[Look]]
"""From a Tidegate's URL to a function that gives its status."""

CLIENT = "(this client)"
_SEEDS = 1_000_000


def play(
    contest: Contest,
    *,
    here: Path,
    starts: int,
    tick: Tick,
    said: Callable[[Turn], None],
    watch: Watch,
    seed: int = 0,
    timeout_s: float = 900.0,
    key: str | None = None,
) -> None:
    """Every server `starts` times; commands may name files of the folder `here`. `said` gets each turn when it is over:
    what comes after may fail. Raises ServerError when a server does not come up or fails its first request."""
    for start in range(1, starts + 1):
        for contender in contest.servers:
            stage = f"start {start}: {contender.name}"
            tick(stage, 0, 1)
            with StartedServer(contender.start, contender.url, here=here) as server:
                tick(stage, 1, 1)
                for number, wanted in enumerate(contest.loads):
                    for level, clients in enumerate(wanted.levels):
                        load = wanted.load(level, seed=seed + _SEEDS * number, timeout_s=timeout_s, key=key)
                        name = wanted.name if len(wanted.levels) == 1 else f"{wanted.name}, {clients}"
                        figures, used, counted = _measure(contender, server, load, tick, watch)
                        said(Turn(contender.name, name, start, figures, used, counted))


def _measure(
    contender: Contender, server: StartedServer, load: Load, tick: Tick, watch: Watch
) -> tuple[Figures, dict[str, float], dict[str, float]]:
    """What the clients saw, which cores were busy, by how much the server's counters grew."""
    wanted = tuple(contender.counters)

    async def run(look: Look | None) -> tuple[Figures, dict[str, float], dict[str, float]]:
        async with client_of(load, contender.url, contender.model) as client:
            looks, before = [look()] if look else [], counters(contender.url, wanted)
            busy, own, began = family(server.pid), time.process_time(), time.perf_counter()
            figures = await measure(client, load, 0, tick)
            wall = time.perf_counter() - began
            used = cores(busy, family(server.pid), wall) | {CLIENT: (time.process_time() - own) / wall}
            after = counters(contender.url, wanted)
        counted = {key: after[key] - before[key] for key in wanted}
        if look and (seen := summary([*looks, look()], client.model)):
            counted |= {"preemptions": seen.preemptions, "recomputed": seen.recomputed}
        return figures, used, counted

    with watch(contender.url) if contender.reports else nullcontext() as look:
        return asyncio.run(run(look))
