"""An examination: a task's questions put to a server that speaks OpenAI's protocol, and how many replies are right."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from deploy.bench.client import Client, Sample, ServerError, first_model
from deploy.bench.prompts import Step
from deploy.quality.figures import Estimate
from deploy.quality.tasks import Task
from deploy.terminal import Tick

AT_ONCE = 8
"""Requests that run together; and replies that are graded together are as many as there are cores for them."""
GRADED_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """What a server got in one task: the share of `asked` questions with a right reply; `failed` requests count as
    wrong."""

    task: str
    asked: int
    failed: int
    right: Estimate
    error: str = ""


async def examine(
    url: str,
    tasks: Sequence[Task],
    tick: Tick,
    *,
    model: str | None = None,
    key: str | None = None,
    timeout_s: float = 600.0,
) -> list[Mark]:
    """All `tasks`, one after the other, greedy. Raises ServerError when `url` is no such server, or answers nothing."""
    address = url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), read_bufsize=2**20) as session:
        name = model or await first_model(session, address, key)
        marks = []
        for task in tasks:
            fields = {"stop": list(task.kind.stop)}
            client = Client(session, address, name, task.kind.max_tokens, ignore_eos=False, key=key, fields=fields)
            marks.append(await _examine(client, task, tick))
        return marks


async def _examine(client: Client, task: Task, tick: Tick) -> Mark:
    asking, grading = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(GRADED_AT_ONCE)
    done = 0

    async def one(index: int) -> tuple[Sample, bool]:
        nonlocal done
        async with asking:
            sample = await client.ask(Step(prompt=task.prompts[index]))
        async with grading:
            right = sample.error is None and await asyncio.to_thread(task.questions[index].grade, sample.reply)
        done += 1
        tick(task.kind.name, done, len(task.questions))
        return sample, right

    found = await asyncio.gather(*(one(index) for index in range(len(task.questions))))
    errors = [sample.error for sample, _ in found if sample.error]
    if len(errors) == len(found):
        raise ServerError(f"{client.url} answered none of the questions of {task.kind.name}: {errors[0]}")
    right = Estimate.of([float(right) for _, right in found])
    return Mark(task.kind.name, len(found), len(errors), right, errors[0] if errors else "")
