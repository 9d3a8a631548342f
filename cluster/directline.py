"""DirectLine: an ingress's end of its connection to a group's rank 0: calls and event streams side by side. It knows
frames (workers.switchboard has them), not what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from workers.connection import Connection, Role
from workers.errors import Refused
from workers.outbox import Message
from workers.switchboard import STREAM, Doorway

OPEN_S = 2.0
"""How long connecting may take: the two are in one cluster."""

_Item = tuple[Any, Exception | None]


class DirectLine:
    """Made by `open`. Everything raises ConnectionError once the connection is lost; what a call that was under way has
    done is then unknown."""

    def __init__(self, token: bytes) -> None:
        self._number = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[_Item]] = {}
        self._connection = Connection(token, Role.INGRESS, self._receive, self._end)

    @classmethod
    async def open(cls, doorway: Doorway) -> DirectLine:
        """Connect; OSError (ConnectionError and TimeoutError are such) when nobody who knows the token answers."""
        line = cls(doorway.token)
        try:
            async with asyncio.timeout(OPEN_S):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: line._connection, doorway.host, doorway.port)
                await asyncio.shield(line._connection.opened)
        except BaseException:
            line.close()
            raise
        return line

    @property
    def is_open(self) -> bool:
        """Whether calls get through, as far as this end knows."""
        return self._connection.is_open

    async def call(self, name: str, *arguments: object) -> Any:
        """The answer to call `name`, or what it raised there."""
        number = self._next()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection.send((number, name, arguments))
        self._calls[number] = answer
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    async def events(self, ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
        """The stream behind message `acked`. What comes after it is closed here is thrown away."""
        number = self._next()
        items: asyncio.Queue[_Item] = asyncio.Queue()
        self._connection.send((number, STREAM, (ingress, acked)))
        self._streams[number] = items
        try:
            while True:
                value, error = await items.get()
                if error is not None:
                    raise error
                if value is None:
                    return
                yield value
        finally:
            self._streams.pop(number, None)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _receive(self, _: Connection, frame: Any) -> None:
        number, value, error = frame
        if (items := self._streams.get(number)) is not None:
            items.put_nowait((value, error))
        elif (answer := self._calls.get(number)) is not None and not answer.done():
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    def _end(self, _: Connection) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the connection to rank 0 is lost"))
        for items in self._streams.values():
            items.put_nowait((None, ConnectionError("the connection to rank 0 is lost")))
