"""When messages go: what presses at once, the rest not sooner than a moment after the one before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from workers.outbox import Message, Outbox
from workers.plan import Finish, TokenEvent
from workers.reader import Reader

NEVER = 3600.0


def event(index: int, *tokens: int, finish: Finish | None = None) -> TokenEvent:
    return TokenEvent("r", 0, index, tokens, finish)


def tokens_of(message: Message | None) -> tuple[int, ...]:
    assert message is not None
    return tuple(token for event in message.events for token in event.tokens)


def run(scenario: Callable[[Callable[[float], tuple[Reader, Outbox]]], Awaitable[None]]) -> None:
    async def body() -> None:
        def make(pace_s: float) -> tuple[Reader, Outbox]:
            reader = Reader(asyncio.get_running_loop(), pace_s)
            outbox = Outbox(1, reader.wake)
            reader.attach(outbox)
            return reader, outbox

        async with asyncio.timeout(20):
            await scenario(make)

    asyncio.run(body())


def test_first_and_last_go_at_once_and_what_came_between_with_the_last() -> None:
    async def scenario(make: Callable[[float], tuple[Reader, Outbox]]) -> None:
        reader, outbox = make(NEVER)
        outbox.put([event(0, 5)])
        assert tokens_of(await reader.next()) == (5,)
        outbox.put([event(1, 6)])
        outbox.put([event(2, 7)])
        waiting = asyncio.create_task(reader.next())
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        outbox.put([event(3, 8, finish=Finish.LENGTH)])
        assert tokens_of(await waiting) == (6, 7, 8)

    run(scenario)


def test_what_can_wait_goes_when_it_is_due() -> None:
    async def scenario(make: Callable[[float], tuple[Reader, Outbox]]) -> None:
        reader, outbox = make(0.05)
        clock = asyncio.get_running_loop().time
        outbox.put([event(0, 5)])
        await reader.next()
        began = clock()
        outbox.put([event(1, 6)])
        assert tokens_of(await reader.next()) == (6,)
        assert clock() - began > 0.04

    run(scenario)


def test_without_a_pace_every_message_goes_at_once() -> None:
    async def scenario(make: Callable[[float], tuple[Reader, Outbox]]) -> None:
        reader, outbox = make(0.0)
        for index in range(5):
            outbox.put([event(index, index)])
            assert tokens_of(await reader.next()) == (index,)

    run(scenario)


@pytest.mark.parametrize("resting", [False, True])
def test_a_closed_box_and_a_newer_reader_end_it(resting: bool) -> None:
    async def scenario(make: Callable[[float], tuple[Reader, Outbox]]) -> None:
        for end in ("close", "retire"):
            reader, outbox = make(NEVER)
            if resting:
                outbox.put([event(0, 5)])
                await reader.next()
                outbox.put([event(1, 6)])
            waiting = asyncio.create_task(reader.next())
            await asyncio.sleep(0)
            if end == "close":
                outbox.close()
                if resting:
                    assert tokens_of(await waiting) == (6,)
                    waiting = asyncio.create_task(reader.next())
            else:
                reader.retire()
            assert await waiting is None

    run(scenario)


def test_nothing_is_lost_or_late_whoever_writes_while_it_reads() -> None:
    """A writer of its own, at all speeds; every first and last token must come although nothing else wakes."""

    async def scenario(make: Callable[[float], tuple[Reader, Outbox]]) -> None:
        for pace_s in (0.0, 0.001, NEVER):
            reader, outbox = make(pace_s)
            count = 3000

            def write(outbox: Outbox = outbox, count: int = count) -> None:
                for index in range(count):
                    outbox.put([event(index, index, finish=Finish.LENGTH if index == count - 1 else None)])
                outbox.close()

            writer = threading.Thread(target=write)
            writer.start()
            got: list[int] = []
            while (message := await reader.next()) is not None:
                got.extend(tokens_of(message))
            writer.join()
            assert got == list(range(count))

    run(scenario)
