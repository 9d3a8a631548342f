"""An answer as server-sent events: one write for each event of the model, the client watched meanwhile.

By the time this response exists the first delta has come, so that whatever was refused kept its HTTP status. What fails
later is an event with an `error`, then the end mark.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, internal
from cluster.protocol.answers import DONE, Chunks, event
from cluster.protocol.choice import Choice, Delta
from cluster.protocol.connection import Connection, Gone
from cluster.protocol.envelope import log_failure

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """`owned` closes the deltas and the connection; it is closed at the end, whatever the end."""

    def __init__(
        self,
        first: Delta,
        deltas: AsyncIterator[Delta],
        choices: Sequence[Choice],
        chunks: Chunks,
        connection: Connection,
        owned: AsyncExitStack,
    ) -> None:
        super().__init__(self._events(first), headers=HEADERS, media_type="text/event-stream; charset=utf-8")
        self._deltas = deltas
        self._choices = choices
        self._chunks = chunks
        self._connection = connection
        self._owned = owned
        self._started: set[int] = set()
        self._running = len(choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client stays for."""
        async with self._owned:
            with suppress(Gone, OSError):  # the client left: to close the deltas is all there is to do
                await self._connection.run(self.stream_response(send))

    async def _events(self, first: Delta) -> AsyncIterator[bytes]:
        try:
            yield self._written(first)
            async for delta in self._deltas:
                written = self._written(delta)
                if written:
                    yield written
        except ApiError as error:
            yield event(dict(error.body())) + DONE
        except Exception as error:
            log_failure(error, self._choices[0].generation.id)
            yield event(dict(internal().body())) + DONE

    def _written(self, delta: Delta) -> bytes:
        """The events that a delta makes: none while its text is held back."""
        written = b""
        if delta.index not in self._started:
            self._started.add(delta.index)
            written = self._chunks.start(delta.index)
        if delta.text:
            written += self._chunks.text(delta.index, delta.text)
        if delta.reason is not None:
            written += self._chunks.finish(delta.index, delta.reason)
            self._running -= 1
        return written if self._running else written + self._chunks.end(self._choices)
