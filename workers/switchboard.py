"""Switchboard: the socket on which a group's rank 0 answers ingresses: calls, and event streams that ingresses read.

Ray can carry both, and does where this cannot be reached; but each of its calls costs several processes about a
millisecond of a core, which a small model's step would rather have. Knows no engine: it is given what to answer with.

A frame from an ingress is (number, name, arguments), one back (number, value, error); a stream's frames all bear the
number of the call that asked for it, the last one the value None.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from workers.connection import Connection, Role
from workers.errors import CallFailed, EngineRefused
from workers.plan import GroupDead

_log = logging.getLogger(__name__)

STREAM = "events"
"""The name of the call that is answered with a stream."""


@dataclass(frozen=True, slots=True)
class Doorway:
    """Where a switchboard listens, and the token that those must know who connect."""

    host: str
    port: int
    token: bytes

    def __repr__(self) -> str:
        return f"Doorway({self.host}:{self.port})"  # the token is nobody's business who reads a log


class Switchboard:
    """`calls` are answered at once, by name; `events(ingress, acked)` gives a stream. All on the loop that `listen` was
    called on."""

    def __init__(
        self,
        calls: Mapping[str, Callable[..., Any]],
        events: Callable[[str, int | None], AsyncGenerator[object, None]],
    ) -> None:
        self._calls = calls
        self._events = events
        self._token = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self._pumps: dict[Connection, set[asyncio.Task[None]]] = {}

    async def listen(self, host: str) -> Doorway:
        """Listen on `host` alone, at any free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, host, 0)
        return Doorway(host, self._server.sockets[0].getsockname()[1], self._token)

    async def close(self) -> None:
        """End every connection and listen no more."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._pumps):
            connection.close()
        await asyncio.sleep(0)

    def _connection(self) -> Connection:
        connection = Connection(self._token, Role.GROUP, self._answer, self._forget)
        self._pumps[connection] = set()
        return connection

    def _answer(self, connection: Connection, frame: Any) -> None:
        number, name, arguments = frame
        if name == STREAM:
            task = asyncio.create_task(self._pump(connection, number, *arguments))
            self._pumps[connection].add(task)
            task.add_done_callback(self._pumps[connection].discard)
            return
        value: Any = None
        error: Exception | None = None
        try:
            value = self._calls[name](*arguments)
        except (EngineRefused, GroupDead) as refusal:
            error = refusal
        except Exception as failure:
            _log.exception("the call %s failed", name)
            error = CallFailed(f"{name}: {failure!r}")
        connection.send((number, value, error))

    async def _pump(self, connection: Connection, number: int, ingress: str, acked: int | None) -> None:
        """Send the stream's messages as they come, no faster than they are read."""
        try:
            async with aclosing(self._events(ingress, acked)) as messages:
                async for message in messages:
                    connection.send((number, message, None))
                    await connection.drained()
            connection.send((number, None, None))
        except ConnectionError:
            return  # whoever wants to read on will connect again
        except Exception as failure:
            _log.exception("an event stream failed")
            if connection.is_open:
                connection.send((number, None, CallFailed(f"{STREAM}: {failure!r}")))

    def _forget(self, connection: Connection) -> None:
        for task in self._pumps.pop(connection, ()):
            task.cancel()
