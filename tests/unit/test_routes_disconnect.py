"""A client that leaves ends its generations, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.generation import Generation
from tests.scripted import Call, Scripted, app_of, ids
from workers.plan import TokenEvent


def stuck_after(tokens: int, prompts: int = 1) -> Scripted:
    """Some tokens, then nothing more."""

    def script(generation: Generation) -> Any:
        for index, token in enumerate(ids("the quick brown fox")[:tokens]):
            yield TokenEvent(generation.id, 0, index, (token,))
        yield asyncio.Event().wait

    return Scripted(script)


def asking(stream: bool, prompts: int = 1) -> bytes:
    return json.dumps({"model": "tiny", "prompt": ["hi"] * prompts, "stream": stream}).encode()


async def until(done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 20)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "tasks were left behind"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_closes_its_generations_at_once(stream: bool, tokens: int, prompts: int) -> None:
    async def work() -> None:
        completer = stuck_after(tokens)
        call = Call(app_of(completer), "/v1/completions", asking(stream, prompts))
        await until(lambda: len(completer.seen) == prompts)
        for _ in range(tokens * prompts if stream else 0):
            await call.writes.get()
        assert not completer.closed
        call.leave()
        await call.task
        assert len(completer.closed) == prompts

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_cancels_the_call_closes_the_generation(stream: bool) -> None:
    async def work() -> None:
        completer = stuck_after(2)
        call = Call(app_of(completer), "/v1/completions", asking(stream))
        await until(lambda: bool(completer.seen))
        if stream:
            assert await call.status() == 200
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        assert len(completer.closed) == 1

    run(work)


def test_a_socket_that_breaks_at_a_write_closes_the_generation() -> None:
    async def work() -> None:
        completer = stuck_after(3)
        call = Call(app_of(completer), "/v1/completions", asking(True), break_at=2)
        await call.task
        assert len(completer.closed) == 1

    run(work)


def test_a_client_that_does_not_read_holds_up_its_own_stream_only() -> None:
    async def work() -> None:
        drawn = []

        def script(generation: Generation) -> Any:
            for index in range(100):
                drawn.append(index)
                yield TokenEvent(generation.id, 0, index, ids("a"))

        completer = Scripted(script)
        call = Call(app_of(completer), "/v1/completions", asking(True), buffer=3)
        await until(lambda: call.writes.full())
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(drawn) < 8, "tokens wait with the completer, not in the ingress"
        call.leave()
        await call.task
        assert completer.closed

    run(work)


def test_a_client_that_leaves_within_its_body_asks_nothing() -> None:
    async def work() -> None:
        completer = stuck_after(0)
        call = Call(app_of(completer), "/v1/completions", [asking(True)[:10]], whole=False)
        call.leave()
        await call.task
        assert not completer.seen

    run(work)
