"""Dispatch: sends requests at the pace that the server allows, and again where that may help.

A refusal for want of room is no failure, nor is a server that dies and comes back. What ends a batch is a server that
answers none of its requests for `patience_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from deploy.jobs.client import Away, Busy, Refused
from deploy.jobs.pace import Pace

Result = TypeVar("Result")

FAILURES = 6
"""A request on which a server that answers others fails so often is given up."""


class GaveUp(Exception):
    """The server gave no answer for too long: what is not done stays undone, for another run."""


class Dispatch:
    """Requests of one batch. `waited` tells of an answer whether it stood in the server's line for long."""

    def __init__(self, pace: Pace, patience_s: float, on_trouble: Callable[[str], None] = lambda text: None) -> None:
        self._pace = pace
        self._patience_s = patience_s
        self._on_trouble = on_trouble
        self._changed = asyncio.Condition()
        self._heard_at = self._now()

    @property
    def pace(self) -> Pace:
        """How it goes."""
        return self._pace

    async def send(self, call: Callable[[], Awaitable[Result]], *, learns: bool = True) -> Result:
        """What `call` gives, sooner or later. Not `learns`: it takes so little that the pace learns nothing of it.
        Raises Refused, ServerError, GaveUp."""
        failures, asked_at = 0, self._now()
        while True:
            sent_at = await self._go()
            try:
                result = await call()
            except Busy as busy:
                async with self._noted() as now:
                    self._pace.refused(sent_at, now, busy.retry_after)
                self._trouble(asked_at, str(busy))
            except Away as away:
                async with self._noted() as now:
                    self._pace.failed(sent_at, now)
                failures += away.answered or self._heard_at > sent_at
                if failures >= FAILURES:
                    raise Refused(0, "server_failed", f"failed {failures} times: {away}") from away
                self._trouble(asked_at, str(away))
            except BaseException:
                async with self._noted():
                    self._pace.dropped()
                raise
            else:
                async with self._noted() as now:
                    self._heard_at = now
                    self._answered(result, sent_at, now, learns)
                return result

    def _answered(self, result: object, sent_at: float, now: float, learns: bool) -> None:
        if learns:
            self._pace.answered(sent_at, now, waited=bool(getattr(result, "waited", False)))
        else:
            self._pace.dropped()

    async def _go(self) -> float:
        """Wait for one's turn; the time at which it came."""
        async with self._changed:
            while (wait := self._pace.wait_s(self._now())) != 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), wait)
                except TimeoutError:
                    continue  # the pause is over, perhaps
            now = self._now()
            self._pace.sent(now)
            return now

    @asynccontextmanager
    async def _noted(self) -> AsyncIterator[float]:
        """Now is the time; whoever waits for his turn looks again."""
        async with self._changed:
            yield self._now()
            self._changed.notify_all()

    def _trouble(self, asked_at: float, text: str) -> None:
        self._on_trouble(text)
        silent = self._now() - max(self._heard_at, asked_at)
        if silent > self._patience_s:
            raise GaveUp(f"no answer for {silent:.0f} s (--patience): {text}")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
