"""Connection: one end of a socket between an ingress and a group's rank 0. Both ends prove that they know a token, then
whole values go both ways. It knows neither what they mean nor who made the socket.

The proof is a challenge and an answer (HMAC, RFC 2104) in each direction, so that the token itself never travels, and
nothing is unpacked before it. The bytes are not encrypted, as Ray's own are not unless it is told to.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

from workers.codec import pack, unpack

_log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
"""Of one value: a batch of requests whose prompts are very long is far smaller."""
PROOF_S = 5.0
"""How long the other end may take to prove itself."""
_LENGTH = struct.Struct("!I")
_NONCE = 32
_PROOF = 32
_SILENT_S = 20
"""After so long without an answer from the other machine the connection is lost."""


class Role(Enum):
    """Which end this is: the two prove themselves with different words, so that none can send back what it heard."""

    INGRESS = b"ingress"
    GROUP = b"group"

    @property
    def other(self) -> Role:
        """The other end's."""
        return Role.GROUP if self is Role.INGRESS else Role.INGRESS


class Connection(asyncio.Protocol):
    """`receive(connection, value)` is called for every value, `ended(connection)` once: nothing more comes or goes.
    `opened` is done when both have proved themselves and values may be sent; ConnectionError when that will not be."""

    def __init__(
        self,
        token: bytes,
        role: Role,
        receive: Callable[[Connection, Any], None],
        ended: Callable[[Connection], None],
    ) -> None:
        self._token = token
        self._role = role
        self._receive = receive
        self._ended = ended
        self._nonce = secrets.token_bytes(_NONCE)
        self._heard: bytes | None = None
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._alarm = loop.call_later(PROOF_S, self.close)

    @property
    def is_open(self) -> bool:
        """Whether values can be sent now."""
        return self._transport is not None and not self._transport.is_closing() and _succeeded(self.opened)

    def send(self, value: object) -> None:
        """Send `value`; ConnectionError when the connection is not open."""
        if not self.is_open:
            raise ConnectionError("the connection is closed")
        content = pack(value)
        if len(content) > MOST_BYTES:
            raise ValueError(f"{len(content)} bytes are more than one message may have ({MOST_BYTES})")
        assert self._transport is not None
        self._transport.write(_LENGTH.pack(len(content)) + content)

    async def drained(self) -> None:
        """Return when the other end reads fast enough for more, or nothing can be sent any more."""
        await self._room.wait()

    def close(self) -> None:
        """End it; what was sent before still goes."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the challenge."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's by inheritance
        _notice_silence(transport.get_extra_info("socket"))
        self._transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        """Take in what came; end the connection when it is nothing that the other end would send."""
        self._buffer += data
        try:
            while self._step():
                pass
        except Exception as error:  # whatever unpacking or the receiver raises: this connection is of no use any more
            _log.warning("a connection between ingress and group is closed: %r", error)
            self._buffer.clear()
            assert self._transport is not None
            self._transport.abort()

    def pause_writing(self) -> None:
        """The other end reads too slowly."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing more comes or goes."""
        self._alarm.cancel()
        self._room.set()
        if not self.opened.done():
            self.opened.set_exception(ConnectionError("the other end did not prove itself"))
            self.opened.exception()  # nobody need be waiting
        self._ended(self)

    def _step(self) -> bool:
        """Take one thing off the buffer; False when there is none in whole."""
        if self._heard is None:
            if (nonce := self._taken(_NONCE)) is None:
                return False
            self._heard = nonce
            assert self._transport is not None
            self._transport.write(self._proof(self._role, nonce, self._nonce))
            return True
        if not self.opened.done():
            if (proof := self._taken(_PROOF)) is None:
                return False
            if not hmac.compare_digest(proof, self._proof(self._role.other, self._nonce, self._heard)):
                raise PermissionError("the other end does not know the token")
            self._alarm.cancel()
            self.opened.set_result(None)
            return True
        if len(self._buffer) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        if (frame := self._taken(length, _LENGTH.size)) is None:
            return False
        self._receive(self, unpack(frame))
        return True

    def _taken(self, count: int, skipped: int = 0) -> bytes | None:
        """So many bytes off the buffer, what stands before them thrown away; None while they are not all there."""
        end = skipped + count
        if len(self._buffer) < end:
            return None
        taken = bytes(memoryview(self._buffer)[skipped:end])
        del self._buffer[:end]
        return taken

    def _proof(self, role: Role, challenge: bytes, own: bytes) -> bytes:
        return hmac.digest(self._token, role.value + challenge + own, "sha256")


def _succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _notice_silence(wire: Any) -> None:
    """A machine that is gone sends no farewell: let the kernel ask, and give up on what is never confirmed."""
    if wire is None or wire.family not in (socket.AF_INET, socket.AF_INET6):
        return
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENT_S // 2),
        ("TCP_KEEPINTVL", _SILENT_S // 4),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", _SILENT_S * 1000),
    ):
        if hasattr(socket, option):  # not every system has all of them
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
