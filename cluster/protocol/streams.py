"""An answer as server-sent events: one write for each event of the model, the client watched meanwhile.

By the time this response exists the first delta has come, or has been waited for so long that the client must hear
something: what is refused before that keeps its HTTP status. What fails later is an event with an `error`, then the end
mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.errors import ApiError, internal
from cluster.protocol.answers import DONE, Chunks, event, waiting
from cluster.protocol.choice import Choice, Delta
from cluster.protocol.connection import Connection, Gone
from cluster.protocol.envelope import log_failure
from cluster.protocol.heartbeat import Heartbeat

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """`first` is the first of the deltas, or will be. `owned` closes them and the connection; it is closed at the end,
    whatever the end. After `comment_s` of silence a comment is sent, with what `ahead` tells of the waiting line."""

    def __init__(
        self,
        first: asyncio.Future[Delta],
        deltas: AsyncIterator[Delta],
        choices: Sequence[Choice],
        chunks: Chunks,
        connection: Connection,
        comment_s: float,
        ahead: Callable[[str], int | None],
        owned: AsyncExitStack,
    ) -> None:
        super().__init__(self._events(), headers=HEADERS, media_type="text/event-stream; charset=utf-8")
        self._first = first
        self._deltas = deltas
        self._choices = choices
        self._chunks = chunks
        self._connection = connection
        self._comment_s = comment_s
        self._ahead = ahead
        self._owned = owned
        self._started: set[int] = set()
        self._running = len(choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client stays for."""
        async with self._owned:
            with suppress(Gone, OSError):  # the client left: to close the deltas is all there is to do
                async with Heartbeat(send, self._comment_s, self._comment) as heartbeat:
                    await self._connection.run(self.stream_response(heartbeat.send))

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if not self._first.done():
                yield self._comment()
            yield self._written(await self._first)
            async for delta in self._deltas:
                written = self._written(delta)
                if written:
                    yield written
        except ApiError as error:
            yield event(dict(error.body())) + DONE
        except Exception as error:
            log_failure(error, self._choices[0].generation.id)
            yield event(dict(internal().body())) + DONE

    def _comment(self) -> bytes:
        """Of the choice that has the most before it."""
        places = [place for choice in self._choices if (place := self._ahead(choice.generation.id)) is not None]
        return waiting(max(places) if places else None)

    def _written(self, delta: Delta) -> bytes:
        """The events that a delta makes: none while its text is held back."""
        written = b""
        if delta.index not in self._started:
            self._started.add(delta.index)
            written = self._chunks.start(delta.index)
        if delta.told:
            logprobs = self._chunks.logprobs(delta.told, self._choices[delta.index].spelling)
            written += self._chunks.text(delta.index, delta.text, logprobs)
        elif delta.text:
            written += self._chunks.text(delta.index, delta.text)
        if delta.reason is not None:
            written += self._chunks.finish(delta.index, delta.reason)
            self._running -= 1
        return written if self._running else written + self._chunks.end(self._choices)
