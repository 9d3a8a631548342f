"""What one client has not read yet: a single event that grows until it is taken, or the error it ends with."""

from __future__ import annotations

import asyncio

from workers.logprobs import follow
from workers.plan import TokenEvent


def merge(unread: TokenEvent, news: TokenEvent) -> TokenEvent:
    """One event for two that follow each other."""
    return TokenEvent(
        request=news.request,
        attempt=news.attempt,
        index=unread.index,
        tokens=unread.tokens + news.tokens,
        finish=news.finish,
        cached=news.cached,
        error=news.error,
        logprobs=follow(unread.logprobs, news.logprobs),
        prompt=news.prompt if unread.prompt is None else unread.prompt,
    )


class Mailbox:
    """One writer, one reader, one event loop. Its size is bounded by the request's max_tokens."""

    def __init__(self) -> None:
        self._unread: TokenEvent | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Add news; what was not read yet grows by it."""
        self._unread = merge(self._unread, event) if self._unread else event
        self._notify()

    def fail(self, error: Exception) -> None:
        """The reader gets `error` once it has read the rest."""
        self._error = error
        self._notify()

    async def get(self) -> TokenEvent:
        """Everything unread as one event, as soon as there is something; raises what `fail` was given."""
        while self._unread is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event, self._unread = self._unread, None
        return event

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
