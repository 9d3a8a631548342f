"""EventStreams: the engine's outboxes as streams that ingresses read, one reader per ingress. It knows neither Ray nor
sockets: both carry what it yields. Used on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from workers.engine import Engine
from workers.errors import EngineRefused, Refused
from workers.outbox import Message, Outbox
from workers.reader import Reader


class EventStreams:
    """Of `engine`; messages of a stream are at least `pace_s` apart unless they press. `clock` is the engine's."""

    def __init__(self, engine: Engine, pace_s: float, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._pace_s = pace_s
        self._clock = clock
        self._readers: dict[str, Reader] = {}

    async def read(self, ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
        """The events for `ingress`, anew or (`acked`) behind a message it has handled. First an empty message numbered
        0 that says the subscription stands, or Refused; the stream ends when the engine closes it or a newer reader
        takes over."""
        reader = Reader(asyncio.get_running_loop(), self._pace_s)
        try:
            reader.attach(self._open(ingress, acked, reader.wake))
        except EngineRefused as refusal:
            yield Refused("", 0, refusal.code, refusal.message)
            return
        old, self._readers[ingress] = self._readers.get(ingress), reader
        if old:
            old.retire()
        try:
            yield Message(0, self._engine.epoch, ())
            while (message := await reader.next()) is not None:
                yield message
        finally:
            if self._readers.get(ingress) is reader:
                del self._readers[ingress]

    def _open(self, ingress: str, acked: int | None, wake: Callable[[], None]) -> Outbox:
        now = self._clock()
        if acked is None:
            return self._engine.subscribe(ingress, wake, now)
        return self._engine.resubscribe(ingress, acked, wake, now)
