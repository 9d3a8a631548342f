"""Whether the client is still there while we work for it. Knows ASGI's `receive` and nothing else of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from cluster.errors import ApiError

Result = TypeVar("Result")


class Gone(ApiError):
    """The client left. As an answer it reaches nobody."""

    def __init__(self) -> None:
        super().__init__("The client left.", "client_closed")


class Connection:
    """Watches one client, from when its request is read until `close`."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_until_gone(receive))

    async def run(self, work: Awaitable[Result]) -> Result:
        """The result of `work`, which is cancelled, and awaited, when the client leaves first: then raises Gone."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
                if not task.cancelled():
                    task.exception()  # seen: what a cancelled task ends with is nobody's news

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()
        if self._gone.done() and not self._gone.cancelled():
            self._gone.exception()  # seen: a connection that broke has gone, however it broke


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
