"""The asyncio tasks that one object has started, so that none outlives it and none fails unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

_log = logging.getLogger(__name__)


class Crew:
    """Tasks run until they end or `dismiss` cancels them. A task that raises is logged: nobody awaits it.

    A task starts with an empty context, whoever started it: what is shared by many requests must not belong to the one
    during which it happened to start. (Ray keeps the current call in a context variable, and a cancelled call takes the
    calls made under it along: an abort for fifty requests, say, or the event stream.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of this crew."""
        task = asyncio.create_task(work, name=self._name, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._release)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all have ended, those that they start meanwhile included, for at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self._tasks and loop.time() < until:
            await asyncio.wait(self._tasks, timeout=until - loop.time())

    async def dismiss(self) -> None:
        """Cancel all, and wait until they have ended (not for the task that calls)."""
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    def _release(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of %s failed", self._name, exc_info=task.exception())
