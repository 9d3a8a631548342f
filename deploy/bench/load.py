"""Load on OpenAI-compatible servers: closed loop or Poisson arrivals, levels one after the other, servers side by side.

Asks every server the same things and compares with transformers' own generate in the same run, if wanted. Knows nothing
of how a server works; printing is `deploy.tables`' business.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.bench.client import Client, Sample, ServerError, first_model
from deploy.bench.figures import Figures
from deploy.bench.prompts import Message, PromptError, Task, file_tasks, random_tasks, session_tasks
from deploy.terminal import Tick


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask, how often, how fast. `prompts` is "random", "shared-prefix", "multi-turn" or a JSONL file's path;
    `levels` are clients at once, or requests per second when `open_loop`; lengths in words and tokens; `key` is the API
    key that all requests carry."""

    prompts: str = "random"
    requests: int = 32
    levels: tuple[float, ...] = (8,)
    open_loop: bool = False
    prompt_words: int = 128
    shared_words: int = 0
    turns: int = 4
    max_tokens: int = 64
    ignore_eos: bool = True
    session: str | None = None
    seed: int = 0
    warmup: int = 1
    timeout_s: float = 900.0
    key: str | None = None

    def tasks(self, level: int) -> tuple[Task, ...]:
        """The tasks of the level with that index; each level asks something new, so that no level finds the answers of
        the one before in a prefix cache."""
        seed = self.seed + 1000 * level
        if self.prompts == "multi-turn":
            return session_tasks(self.requests, turns=self.turns, length=self.prompt_words, seed=seed)
        if self.prompts in ("random", "shared-prefix"):
            shared = self.shared_words or (256 if self.prompts == "shared-prefix" else 0)
            return random_tasks(self.requests, length=self.prompt_words, shared=shared, seed=seed)
        return file_tasks(Path(self.prompts), self.requests)

    def label(self, level: float) -> str:
        """The level as a table says it."""
        return f"{level:g}/s" if self.open_loop else f"{level:g}"


async def compare(load: Load, servers: Sequence[tuple[str, str | None]], tick: Tick) -> list[Figures]:
    """Run every level of `load` on each of `servers` (URL, model or None) in turn. Raises ServerError when one of them
    does not answer at all, PromptError for an unusable file; a failed request is a figure, not an exception."""
    async with AsyncExitStack() as open_clients:
        clients = [await open_clients.enter_async_context(client_of(load, *server)) for server in servers]
        return [await measure(client, load, level, tick) for level in range(len(load.levels)) for client in clients]


@asynccontextmanager
async def client_of(load: Load, address: str, model: str | None) -> AsyncIterator[Client]:
    """A client of the server at `address` (model None: its first), warmed up. Raises ServerError when it does not
    answer."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        url = address.rstrip("/").removesuffix("/v1")
        name = model or await first_model(session, url, load.key)
        client = Client(session, url, name, load.max_tokens, load.ignore_eos, load.key)
        await _warm_up(client, load)
        yield client


async def _warm_up(client: Client, load: Load) -> None:
    """Requests that are not counted; with a prompt of their own."""
    for task in random_tasks(load.warmup, length=load.prompt_words, shared=0, seed=load.seed - 1):
        sample = await client.ask(task.steps[0])
        if sample.error:
            raise ServerError(f"{client.url}: the first request failed: {sample.error}")


async def measure(client: Client, load: Load, index: int, tick: Tick) -> Figures:
    """All tasks of the level with that index on one server. Raises PromptError for an unusable file."""
    level, tasks = load.levels[index], load.tasks(index)
    total = sum(len(task.steps) for task in tasks)
    samples: list[Sample] = []
    name = f"{client.url} at {load.label(level)}"
    tick(name, 0, total)

    async def play(task: Task) -> None:
        history: list[Message] = []
        for step in task.steps:
            sample = await client.ask(step, history, task.session or load.session)
            samples.append(sample)
            tick(name, len(samples), total)
            history += [*step.messages, {"role": "assistant", "content": sample.reply}]

    start = time.perf_counter()
    if load.open_loop:
        await _arrive(play, tasks, level, load.seed)
    else:
        await _take_turns(play, tasks, int(level))
    return Figures.of(client.url, load.label(level), samples, time.perf_counter() - start)


async def _take_turns(play: Callable[[Task], Any], tasks: Sequence[Task], clients: int) -> None:
    """Closed loop: `clients` at once, each takes the next task when its last one is done."""
    queue = iter(tasks)

    async def client() -> None:
        for task in queue:
            await play(task)

    await asyncio.gather(*(client() for _ in range(clients)))


async def _arrive(play: Callable[[Task], Any], tasks: Sequence[Task], rate: float, seed: int) -> None:
    """Open loop: tasks begin at Poisson times of `rate` per second, however many are still running."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    due, running = loop.time(), []
    for task in tasks:
        await asyncio.sleep(due - loop.time())
        running.append(asyncio.ensure_future(play(task)))
        due += rng.expovariate(rate)
    await asyncio.gather(*running)


def baseline(load: Load, folder: Path, *, dtype: str, threads: int) -> list[Figures]:
    """transformers' batched generate on the same prompts, a batch size per closed-loop level, in a process of its own.

    Raises ServerError when it fails, PromptError for a load that a static batch cannot run."""
    if load.open_loop:
        raise PromptError("a static batch has no arrival rate: give --concurrency, not --rate")
    figures = []
    for index, level in enumerate(load.levels):
        prompts = [step.prompt for task in load.tasks(index) for step in task.steps]
        if None in prompts:
            raise PromptError("the transformers baseline runs completions only: random, shared-prefix or a prompt file")
        job = {"folder": str(folder), "dtype": dtype, "threads": threads, "batch": int(level)}
        job |= {"max_tokens": load.max_tokens, "prompts": prompts}
        command = [sys.executable, "-m", "deploy.bench.baseline"]
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2]
        )
        if done.returncode:
            raise ServerError(f"the transformers baseline failed:\n{done.stderr.strip()[-1500:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        samples = [Sample(**sample) for sample in said["samples"]]
        figures.append(
            Figures.of(f"transformers {dtype}, {threads} threads", load.label(level), samples, said["wall_s"])
        )
    return figures
