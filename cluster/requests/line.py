"""An ingress's place in the coordinator's waiting line: one long poll for the news of all that wait, while any does.

Numbers acknowledge what was handled, so that an answer that got lost is told again. Knows no request: it passes answers
on, and says when the line is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.coordination.grants import Grant, LineNews, Refusal
from cluster.requests.crew import Crew
from cluster.requests.ports import CoordinatorPort

_log = logging.getLogger(__name__)

NEWS_S = 15.0
"""A poll that has not come back after so long is lost: the coordinator answers sooner, with or without news."""
REST_S = 0.25
"""Between a poll that failed and the next."""


class LineWatch:
    """`deliver` gets each answer, at least once; `lost` is called when the coordinator may have forgotten who waits;
    `waiting` says whether anybody does."""

    def __init__(
        self,
        coordinator: CoordinatorPort,
        *,
        deliver: Callable[[Grant | Refusal], None],
        lost: Callable[[], None],
        waiting: Callable[[], bool],
    ) -> None:
        self._coordinator = coordinator
        self._deliver = deliver
        self._lost = lost
        self._waiting = waiting
        self._crew = Crew("line")
        self._acked = 0
        self._life: int | None = None
        self._failed = False
        self.active = False

    def begin(self) -> None:
        """Somebody waits: ask for news until nobody does. `active` says whether that goes on."""
        if not self.active:
            self.active = True
            self._crew.start(self._follow())

    async def close(self) -> None:
        """Ask no more."""
        await self._crew.dismiss()

    async def _follow(self) -> None:
        try:
            if self._failed:
                await asyncio.sleep(REST_S)
            while self._waiting() and await self._hear():
                pass
        finally:
            self.active = False

    async def _hear(self) -> bool:
        """One poll; False when it failed. Then all that wait ask again, and who gets a new place begins a new poll."""
        try:
            async with asyncio.timeout(NEWS_S):
                news = await self._coordinator.news(self._acked)
        except Exception as error:
            _log.warning("no news from the coordinator's line: %r", error)
            self._failed = True
            self._lost()
            return False
        self._failed = False
        self._take(news)
        return True

    def _take(self, news: LineNews) -> None:
        # Tickets do not say of which life they are: with the first news of any life, those before it do not count. Nor
        # do they with one that has told less than we have heard.
        forgotten = news.life != self._life or news.number < self._acked
        self._acked, self._life = news.number, news.life
        for answer in news.answers:
            self._deliver(answer)
        if forgotten:
            self._lost()
