"""Reader: an ingress's turn at its outbox; it decides when the next message goes. It knows neither Ray nor steps.

A message costs every process that it passes about as much as a token of a small model, however much it carries. So a
message waits until a moment after the one before; what a client waits for, a first token or an end, goes at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from workers.outbox import Message, Outbox


class Reader:
    """Messages at least `pace_s` apart, unless they press. Made and used on `loop`; `wake` comes from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pace_s: float) -> None:
        self._loop = loop
        self._pace_s = pace_s
        self._due = 0.0
        self._outbox: Outbox | None = None
        self._ready = asyncio.Event()
        self._resting = False
        self._retired = False

    def attach(self, outbox: Outbox) -> None:
        """Read from `outbox`, which has been given `wake`."""
        self._outbox = outbox

    def wake(self) -> None:
        """There is something to read, or the box has closed. Does nothing while it can wait."""
        outbox = self._outbox
        if self._resting and outbox is not None and not (outbox.pressing or outbox.closed):
            return
        with suppress(RuntimeError):  # a loop that is closed has no reader left
            self._loop.call_soon_threadsafe(self._ready.set)

    def retire(self) -> None:
        """A newer reader has taken over."""
        self._retired = True
        self._ready.set()

    async def next(self) -> Message | None:
        """The next message; None when the box has closed and is empty, or another reads it now."""
        outbox = self._outbox
        assert outbox is not None, "attach comes first"
        while not self._retired:
            closed = outbox.closed
            if not (closed or outbox.pressing) and self._loop.time() < self._due:
                await self._rest(outbox)
            elif message := outbox.read():
                self._due = self._loop.time() + self._pace_s
                return message
            elif closed:
                return None
            else:
                await self._ready.wait()
                self._ready.clear()
        return None

    async def _rest(self, outbox: Outbox) -> None:
        """Until a message is due, or sooner when something presses."""
        self._resting = True  # before the look: who writes sets `pressing` first and looks at this afterwards
        try:
            if not (outbox.pressing or outbox.closed or self._retired):
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self._due):
                        await self._ready.wait()
        finally:
            self._resting = False
        self._ready.clear()
