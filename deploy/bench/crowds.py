"""Plays a scenario on a server: every crowd's clients, phase after phase, and what each crowd got.

Knows how requests are timed (`deploy.bench.client`) and nothing of how a server works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import aiohttp

from deploy.bench.client import Client, Sample, first_model
from deploy.bench.figures import Figures
from deploy.bench.prompts import Step
from deploy.bench.scenarios import Crowd, Phase, Scenario
from deploy.terminal import Tick


@dataclass(frozen=True, slots=True)
class Target:
    """A server and a model on it (None: its first). `keys` are API keys by the names that crowds use."""

    url: str
    model: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, keys: Mapping[str, str]) -> Target:
        """From "URL" or "URL#MODEL"."""
        url, _, model = text.partition("#")
        return cls(url.rstrip("/").removesuffix("/v1"), model or None, keys)


async def play(
    scenario: Scenario, target: Target, tick: Tick, *, seed: int = 0, timeout_s: float = 900
) -> list[Figures]:
    """A row per phase and crowd. Raises ServerError when the server does not answer at all."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        key = next(iter(target.keys.values()), None)
        model = target.model or await first_model(session, target.url, key)
        client = Client(session, target.url, model, max_tokens=16)
        rows = []
        for number, phase in enumerate(scenario.phases):
            rows += await _Play(phase, client, target.keys, tick, seed + 1000 * number).run()
        return rows


class _Play:
    """One phase."""

    def __init__(self, phase: Phase, client: Client, keys: Mapping[str, str], tick: Tick, seed: int) -> None:
        self._phase = phase
        self._client = client
        self._keys = keys
        self._tick = tick
        self._seed = seed
        self._ended: list[tuple[Crowd, float, Sample]] = []

    async def run(self) -> list[Figures]:
        began = time.perf_counter()
        clients = [
            asyncio.create_task(self._ask_all(crowd, number))
            for crowd in self._phase.crowds
            for number in range(crowd.clients)
        ]
        ticking = asyncio.create_task(self._show(began))
        done, running = await asyncio.wait(clients, timeout=self._phase.seconds)
        wall = time.perf_counter() - began
        for task in (*running, ticking):
            task.cancel()
        await asyncio.gather(*running, ticking, return_exceptions=True)
        for task in done:
            task.result()  # a fault of ours, not the server's
        return [self._figures(crowd, began, wall) for crowd in self._phase.crowds]

    async def _ask_all(self, crowd: Crowd, number: int) -> None:
        client = replace(self._client, key=self._keys.get(crowd.key), fields=crowd.fields)
        steps = crowd.steps(number, self._seed)
        if crowd.every_s is None:
            for step in steps:
                await self._ask(client, crowd, step)
        else:
            await self._ask_by_the_clock(client, crowd, steps, crowd.every_s)

    async def _ask_by_the_clock(self, client: Client, crowd: Crowd, steps: Iterator[Step], every_s: float) -> None:
        """One request each `every_s`, however long the answers take."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as running:
            for step in steps:
                running.create_task(self._ask(client, crowd, step))
                due += every_s
                await asyncio.sleep(due - loop.time())

    async def _ask(self, client: Client, crowd: Crowd, step: Step) -> None:
        sample = await client.ask(step)
        self._ended.append((crowd, time.perf_counter(), sample))

    async def _show(self, began: float) -> None:
        total = self._phase.seconds or sum(crowd.clients * (crowd.requests or 0) for crowd in self._phase.crowds)
        while True:
            done = time.perf_counter() - began if self._phase.seconds else len(self._ended)
            self._tick(f"{self._client.model}: {self._phase.name}", int(done), int(total))
            await asyncio.sleep(0.5)

    def _figures(self, crowd: Crowd, began: float, wall: float) -> Figures:
        """Of the requests that ended after the warm-up: as many begin before it as are cut off at the end."""
        first = began + self._phase.warm_s
        samples = [sample for owner, at, sample in self._ended if owner is crowd and at >= first]
        name = f"{self._client.url}#{self._client.model}"
        return Figures.of(name, f"{self._phase.name}: {crowd.name}", samples, wall - self._phase.warm_s)


def ttft_ratios(rows: list[Figures]) -> list[str]:
    """How long the quiet one waited in each phase, against the first and against first come, first served."""
    lines = []
    quiet = {row.level.rpartition(":")[0]: row.ttft_ms for row in rows if row.level.endswith(": quiet")}
    idle, fifo = quiet.get("idle"), quiet.get("first come, first served")
    for phase, spread in quiet.items():
        if spread is None:
            continue
        line = f"quiet, {phase}: TTFT p50 {spread.p50:.0f} ms, p95 {spread.p95:.0f} ms"
        if idle and phase != "idle":
            line += f", {spread.p95 / idle.p95:.2f} × idle"
        if fifo and fifo is not spread and phase != "idle":
            line += f", {spread.p95 / fifo.p95:.2f} × first come, first served"
        lines.append(line)
    return lines
