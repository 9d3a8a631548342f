"""One ingress's event stream from one group: opened before anything is submitted, acknowledged, renewed, resumed.

All requests of this ingress that run in the group share it. Knows no request's state: it delivers events, and tells
once when it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cluster.requests.crew import Crew
from cluster.requests.ports import EnginePort
from workers.errors import CODE_DEAD, EngineRefused
from workers.outbox import Message
from workers.plan import GroupDead, TokenEvent

_log = logging.getLogger(__name__)


class StreamLost(Exception):
    """The subscription is over; whoever ran there has been told."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When a subscription does what. Acknowledge after `ack_messages` or `ack_s`, whichever comes first: that only lets
    the group forget, and is a call that costs as much as several messages; renew the lease every `renew_s` and give up
    after `renewals` failures in a row; read at most `rotate_messages` from one stream; resume a broken one up to
    `reconnects` times, `backoff_s` after the first failure and twice as long after each; end when nobody has needed it
    for `idle_s`."""

    ack_messages: int = 256
    ack_s: float = 1.0
    renew_s: float = 1.0
    renewals: int = 5
    rotate_messages: int = 2000
    reconnects: int = 3
    backoff_s: float = 0.1
    idle_s: float = 60.0


class Subscription:
    """`deliver(epoch, event)` is called for every event; `lose(gone)` once, when the stream is lost for good: `gone` if
    the group is dead or out of reach. `busy()` says whether somebody still needs it."""

    def __init__(
        self,
        port: EnginePort,
        rhythm: Rhythm,
        *,
        deliver: Callable[[int, TokenEvent], None],
        lose: Callable[[bool], None],
        busy: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.port = port
        self._rhythm = rhythm
        self._deliver = deliver
        self._lose = lose
        self._busy = busy
        self._clock = clock
        self._crew = Crew("subscription")
        self._opened = asyncio.get_running_loop().create_future()
        self._over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._handled: int | None = None
        self._acked = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._used_at = clock()
        self._crew.start(self._run())

    async def opened(self) -> None:
        """Return once the engine knows this ingress; StreamLost when that will not be."""
        self._used_at = self._clock()
        if self._over.done():
            raise StreamLost
        await asyncio.shield(self._opened)

    def give_up(self, gone: bool) -> None:
        """Somebody found out that it is of no use any more."""
        if not self._over.done():
            self._over.set_result(gone)

    async def close(self, *, unsubscribe: bool) -> None:
        """End without a word to those who use it."""
        if unsubscribe and self._handled is not None and not self._over.done():
            await self._attempt("unsubscribe", self.port.unsubscribe)
        self._over.cancel()
        await self._crew.dismiss()
        self.port.close()

    # -- the life of a stream -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._crew.start(self._read())
        try:
            gone = await self._over
        finally:
            if self._ack_timer:
                self._ack_timer.cancel()
            if not self._opened.done():
                self._opened.set_exception(StreamLost())
                self._opened.exception()  # nobody need be waiting
        self._lose(gone)
        await self._crew.dismiss()
        self.port.close()

    async def _read(self) -> None:
        failures = 0
        while True:
            before = self._handled
            try:
                rotated = await self._read_stream()
            except GroupDead:
                return self.give_up(gone=True)
            except EngineRefused as refused:
                return self.give_up(gone=refused.code == CODE_DEAD)
            except Exception as error:
                _log.info("an event stream broke: %r", error)
                rotated = False
            if rotated:
                continue
            failures = 1 if self._handled != before else failures + 1
            if failures > self._rhythm.reconnects:
                return self.give_up(gone=True)
            await asyncio.sleep(self._rhythm.backoff_s * 2 ** (failures - 1))

    async def _read_stream(self) -> bool:
        """Read until the stream ends (False) or has been read long enough (True)."""
        stream = await self.port.subscribe(self._handled)
        if not self._opened.done():
            self._handled = 0
            self._opened.set_result(None)
            self._crew.start(self._renew())
        async with aclosing(stream):
            left = self._rhythm.rotate_messages
            async for message in stream:
                self._take(message)
                left -= 1
                if not left:
                    return True
        return False

    def _take(self, message: Message) -> None:
        self._used_at = self._clock()
        for event in message.events:
            self._deliver(message.epoch, event)
        self._handled = message.number
        if message.number - self._acked >= self._rhythm.ack_messages:
            self._acknowledge()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(self._rhythm.ack_s, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._ack_timer:
            self._ack_timer.cancel()
            self._ack_timer = None
        number = self._handled or 0
        if number > self._acked and not self._over.done():
            self._acked = number
            self._crew.start(self._attempt("acknowledge", lambda: self.port.ack(number)))

    async def _attempt(self, what: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A call whose failure does not matter: the next one, or the lease, makes up for it."""
        try:
            await call()
        except Exception as error:
            _log.info("cannot %s: %r", what, error)

    async def _renew(self) -> None:
        failures = 0
        while failures < self._rhythm.renewals:
            await asyncio.sleep(self._rhythm.renew_s)
            if self._busy():
                self._used_at = self._clock()
            elif self._clock() - self._used_at > self._rhythm.idle_s:
                return self.give_up(gone=False)
            failures = 0 if await self._renew_once() else failures + 1
        self.give_up(gone=True)

    async def _renew_once(self) -> bool:
        """Whether the call came through; a lapsed lease or a dead group ends the subscription."""
        try:
            async with asyncio.timeout(self._rhythm.renew_s):
                alive = await self.port.renew()
        except GroupDead:
            self.give_up(gone=True)
            return False
        except Exception as error:
            _log.info("cannot renew a lease: %r", error)
            return False
        if not alive:
            self.give_up(gone=False)
        return True
