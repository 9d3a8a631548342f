"""The connection between an ingress and rank 0, over sockets on loopback: who may speak, and what comes through."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
import uvloop

from cluster.directline import DirectLine
from workers import connection as connections
from workers.errors import CallFailed, EngineRefused, Refused
from workers.outbox import Message
from workers.plan import TokenEvent
from workers.switchboard import Doorway, Switchboard


class Desk:
    """What a switchboard is given to answer with. `messages` go to whoever reads, None ends the stream."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.messages: asyncio.Queue[Message | Refused | None] = asyncio.Queue()
        self.sent = 0
        self.closed = 0

    def echo(self, *arguments: object) -> object:
        self.heard.append(arguments)
        return arguments

    def refuse(self) -> None:
        raise EngineRefused("full", "no room")

    def break_down(self) -> None:
        raise ZeroDivisionError("a fault")

    async def events(self, ingress: str, acked: int | None) -> AsyncGenerator[object, None]:
        self.heard.append((ingress, acked))
        try:
            while (message := await self.messages.get()) is not None:
                self.sent += 1
                yield message
        finally:
            self.closed += 1

    @property
    def board(self) -> Switchboard:
        return Switchboard({"echo": self.echo, "refuse": self.refuse, "break": self.break_down}, self.events)


def message(number: int, *tokens: int) -> Message:
    return Message(number, 1, (TokenEvent("r", 0, 0, tokens),))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"], autouse=True)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's replicas run on uvloop, actors on asyncio's own loop."""
    monkeypatch.setattr(sys.modules[__name__], "new_loop", request.param)


new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


def run(scenario: Callable[[Desk, Doorway], Awaitable[None]]) -> None:
    async def body() -> None:
        desk = Desk()
        board = desk.board
        doorway = await board.listen("127.0.0.1")
        async with asyncio.timeout(30):
            try:
                await scenario(desk, doorway)
            finally:
                await board.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(body())


def test_calls_are_answered_each_with_its_own() -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        line = await DirectLine.open(doorway)
        answers = await asyncio.gather(*(line.call("echo", number, "x" * number) for number in range(200)))
        assert answers == [(number, "x" * number) for number in range(200)]
        with pytest.raises(EngineRefused, match="no room"):
            await line.call("refuse")
        with pytest.raises(CallFailed, match="ZeroDivisionError"):
            await line.call("break")
        with pytest.raises(CallFailed, match="KeyError"):
            await line.call("unheard of")
        assert line.is_open
        line.close()

    run(scenario)


def test_large_values_come_through_in_pieces() -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        line = await DirectLine.open(doorway)
        prompt = tuple(range(200_000))
        (back,) = await line.call("echo", prompt)
        assert back == prompt
        line.close()

    run(scenario)


def test_a_stream_and_calls_share_a_connection() -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        line = await DirectLine.open(doorway)
        stream = line.events("i", None)
        desk.messages.put_nowait(message(0))
        assert await anext(stream) == message(0)
        for number in range(1, 50):
            desk.messages.put_nowait(message(number, number))
            assert await line.call("echo", number) == (number,)
        assert [await anext(stream) for _ in range(49)] == [message(number, number) for number in range(1, 50)]
        desk.messages.put_nowait(None)
        assert [item async for item in stream] == []
        assert desk.heard[0] == ("i", None) and desk.closed == 1
        line.close()

    run(scenario)


def test_a_stream_that_is_closed_here_disturbs_nothing() -> None:
    """Its reader takes up another on the same connection; what still comes for the old one goes nowhere."""

    async def scenario(desk: Desk, doorway: Doorway) -> None:
        line = await DirectLine.open(doorway)
        old = line.events("i", None)
        desk.messages.put_nowait(message(0))
        await anext(old)
        await old.aclose()
        desk.messages.put_nowait(message(1))  # the old stream still reads on the other side
        new = line.events("i", 0)
        first = asyncio.ensure_future(anext(new))
        while len(desk.heard) < 2 or desk.sent < 2:
            await asyncio.sleep(0)
        desk.messages.put_nowait(message(1))  # to the old one, which waited first
        while desk.sent < 3:
            await asyncio.sleep(0)
        desk.messages.put_nowait(message(2))
        assert await first == message(2)
        line.close()

    run(scenario)


def test_a_refusal_is_the_streams_first_item() -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        line = await DirectLine.open(doorway)
        refused = Refused("", 0, "no_lease", "lapsed")
        desk.messages.put_nowait(refused)
        desk.messages.put_nowait(None)
        assert [item async for item in line.events("i", 3)] == [refused]
        line.close()

    run(scenario)


@pytest.mark.parametrize("end", ["here", "there"])
def test_what_waits_hears_that_the_connection_is_lost(end: str) -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        board = desk.board
        line = await DirectLine.open(await board.listen("127.0.0.1"))
        stream = line.events("i", None)
        waiting = asyncio.ensure_future(anext(stream))
        await line.call("echo")  # the stream was asked for before
        if end == "here":
            line.close()
        else:
            await board.close()
        with pytest.raises(ConnectionError):
            await waiting
        assert not line.is_open
        with pytest.raises(ConnectionError):
            await line.call("echo")
        with pytest.raises(ConnectionError):
            await anext(line.events("i", 0))
        while not desk.closed:
            await asyncio.sleep(0.01)
        await board.close()

    run(scenario)


def test_nobody_speaks_without_the_token() -> None:
    async def scenario(desk: Desk, doorway: Doorway) -> None:
        with pytest.raises(ConnectionError):
            await DirectLine.open(Doorway(doorway.host, doorway.port, b"x" * 32))
        assert not desk.heard
        line = await DirectLine.open(doorway)
        assert await line.call("echo", 1) == (1,)
        line.close()

    run(scenario)


def test_nobody_is_believed_who_sends_back_what_he_heard() -> None:
    """A false group that mirrors an ingress's bytes: the proof of one role is none of the other."""

    async def scenario(desk: Desk, doorway: Doorway) -> None:
        async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1024):
                writer.write(data)
            writer.close()

        server = await asyncio.start_server(mirror, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError):
            await DirectLine.open(Doorway("127.0.0.1", port, doorway.token))
        server.close()

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
        b"\0" * 64,
        b"\xff" * 200,
        struct.pack("!I", 2**32 - 1) * 20,
    ],
    ids=["silence", "http", "zeros", "ones", "lengths"],
)
def test_a_stranger_is_sent_away_and_others_go_on(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROOF_S", 0.1)

    async def scenario(desk: Desk, doorway: Doorway) -> None:
        reader, writer = await asyncio.open_connection(doorway.host, doorway.port)
        writer.write(sent)
        line = await DirectLine.open(doorway)
        answer = await reader.read(-1) if sent else await reader.read(33)  # to the end of the connection
        assert len(answer) <= 64  # a challenge and a proof of it at most
        assert await line.call("echo", 1) == (1,)
        assert desk.heard == [(1,)]
        writer.close()
        line.close()

    run(scenario)


def test_a_slow_reader_holds_up_its_own_stream_only() -> None:
    """What it does not take stays where it merges; calls of others are answered meanwhile."""

    async def scenario(desk: Desk, doorway: Doorway) -> None:
        slow, quick = await DirectLine.open(doorway), await DirectLine.open(doorway)
        stream = slow.events("slow", None)
        desk.messages.put_nowait(message(0))
        await anext(stream)
        transport = slow._connection._transport
        assert transport is not None
        transport.pause_reading()
        for number in range(1, 200):
            desk.messages.put_nowait(Message(number, 1, (TokenEvent("r", 0, 0, tuple(range(30_000))),)))
        for number in range(200):
            assert await quick.call("echo", number) == (number,)
        stuck = desk.sent
        assert stuck < 200
        transport.resume_reading()
        for number in range(1, 200):
            item = await anext(stream)
            assert isinstance(item, Message) and item.number == number
        assert desk.sent == 200
        slow.close()
        quick.close()

    run(scenario)


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(Doorway("h", 1, b"secret"))
