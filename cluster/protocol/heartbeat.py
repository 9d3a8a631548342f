"""Comments in a stream of server-sent events that is silent for long, so that no load balancer on the way cuts it.

One timer per stream, and nothing per event: a stream that flows pays for none of it. Knows ASGI's `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import Message, Send


class Heartbeat:
    """Stands between a response and `send`. While used as a context, what `comment` gives is sent after `interval`
    seconds of silence."""

    def __init__(self, send: Send, interval: float, comment: Callable[[], bytes]) -> None:
        self._send = send
        self._interval = interval
        self._comment = comment
        self._open = False
        self._busy = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def send(self, message: Message) -> None:
        """The response's own message."""
        async with self._busy:
            await self._send(message)
            self._open = bool(message.get("more_body", message["type"] == "http.response.start"))
            self._last = self._loop.time()

    async def _beat(self) -> None:
        with suppress(OSError):  # the client left, which others notice
            while True:
                await asyncio.sleep(max(0.0, self._last + self._interval - self._loop.time()))
                if self._loop.time() >= self._last + self._interval:
                    await self._break_silence()

    async def _break_silence(self) -> None:
        """Nothing while a message is being sent: a client that does not read is not helped by more to read."""
        self._last = self._loop.time()
        if self._open and not self._busy.locked():
            await self.send({"type": "http.response.body", "body": self._comment(), "more_body": True})
