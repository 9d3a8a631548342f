"""Streams that have nothing to send for long: a comment now and then, the status where it is still open, no task left.

Time is virtual: a comment is due after ten seconds of nothing else happening.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from cluster.generation import Generation
from tests.scripted import Call, Scripted, Step, app_of, events, joined, says
from tests.unit.test_routes_streams import FAILURES, finishes
from tests.virtual_time import run_virtually
from workers.plan import Finish, TokenEvent

COMMENT_S = 10.0
TEXT = "the quick brown fox"
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
ASKS = pytest.mark.parametrize("ask", PATHS)


class Slow:
    """Says `text`; before its token number `at` it waits until `go`. Then `failure`, if there is one."""

    def __init__(self, at: int, failure: Any = None, **told: Any) -> None:
        self.go = asyncio.Event()
        self._at = at
        self._failure = failure
        self._told = told
        self.completer = Scripted(self._script)

    def _script(self, generation: Generation) -> Iterable[Step]:
        steps = list(says(TEXT, **self._told)(generation))
        yield from steps[: self._at]
        yield self.go.wait
        if isinstance(self._failure, Finish):
            yield TokenEvent(generation.id, 0, self._at, (), self._failure, error="rank 1 died: SECRET")
        elif self._failure is not None:
            yield self._failure
        else:
            yield from steps[self._at :]


def call(slow: Slow, ask: str = "completion", stream: bool = True, prompts: int = 1, **options: Any) -> Call:
    app = app_of(slow.completer, comment_s=COMMENT_S)
    content: dict[str, Any] = {"prompt": ["hi"] * prompts}
    if ask == "chat":
        content = {"messages": [{"role": "user", "content": "hi"}]}
    return Call(app, PATHS[ask], json.dumps({"model": "tiny", "stream": stream} | content).encode(), **options)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(work())


async def rest(asked: Call) -> bytes:
    """What is written from now until the end."""
    await asked.task
    return b"".join([await asked.write() for _ in range(asked.writes.qsize())])


@ASKS
@pytest.mark.parametrize("place", [None, 0, 7])
def test_a_stream_that_waits_gets_its_200_and_comments_then_its_whole_answer(ask: str, place: int | None) -> None:
    async def work() -> None:
        slow = Slow(0)
        slow.completer.place = place
        asked = call(slow, ask)
        assert await asked.status() == 200
        comment = b": waiting\n\n" if place is None else b": waiting, %d ahead\n\n" % place
        assert [await asked.write() for _ in range(3)] == [comment] * 3
        slow.go.set()
        text = await rest(asked)
        assert joined(events(text)) == TEXT
        assert finishes(events(text)) == [(0, "stop")] and text.endswith(b"data: [DONE]\n\n")

    run(work)


def test_the_place_in_the_line_is_told_as_it_changes() -> None:
    async def work() -> None:
        slow = Slow(0)
        slow.completer.place = 9
        asked = call(slow)
        await asked.status()
        seen = [await asked.write()]
        slow.completer.place = 4
        while seen[-1] != b": waiting, 4 ahead\n\n":
            seen.append(await asked.write())
        slow.go.set()
        assert joined(events(await rest(asked))) == TEXT

    run(work)


@ASKS
@pytest.mark.parametrize("at", [1, 3])
def test_a_pause_in_mid_stream_is_filled_with_comments(ask: str, at: int) -> None:
    async def work() -> None:
        slow = Slow(at)
        asked = call(slow, ask)
        assert await asked.status() == 200
        written = b""
        while written.count(b": waiting\n\n") < 3:
            written += await asked.write()
        slow.go.set()
        written += await rest(asked)
        assert joined(events(written)) == TEXT
        assert written.endswith(b"data: [DONE]\n\n")

    run(work)


def test_a_stream_that_flows_has_no_comments_however_long_it_is() -> None:
    def script(generation: Generation) -> Iterable[Step]:
        for step in says(TEXT)(generation):
            yield lambda: asyncio.sleep(0.9 * COMMENT_S)
            yield step

    async def work() -> None:
        slow = Slow(0)
        slow.completer.script = script
        asked = call(slow)
        assert await asked.status() == 200
        written = await rest(asked)
        assert joined(events(written)) == TEXT
        assert b": waiting" not in written

    run(work)


@pytest.mark.parametrize("silence", [0.9, 1.1, 2.5, 7.5])
def test_there_is_a_comment_for_each_ten_seconds_of_silence(silence: float) -> None:
    async def work() -> None:
        slow = Slow(2)
        asked = call(slow)
        await asked.status()
        await asyncio.sleep(silence * COMMENT_S)
        slow.go.set()
        assert (await rest(asked)).count(b": waiting\n\n") == int(silence)

    run(work)


@ASKS
@pytest.mark.parametrize(("failure", "status", "code"), [entry for entry in FAILURES if entry[0] is not None])
def test_a_failure_known_in_time_keeps_its_status_and_a_later_one_is_an_event(
    ask: str, failure: Any, status: int, code: str
) -> None:
    async def work() -> None:
        early = Slow(0, failure)
        early.go.set()
        asked = call(early, ask)
        assert await asked.status() == status
        assert json.loads(await rest(asked))["error"]["code"] == code

        late = Slow(0, failure)
        asked = call(late, ask)
        assert await asked.status() == 200
        assert await asked.write() == b": waiting\n\n"
        late.go.set()
        told = events(await rest(asked))
        assert told[0]["error"]["code"] == code and told[1:] == ["[DONE]"]
        assert "SECRET" not in json.dumps(told)

    run(work)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("comments", [0, 1, 3])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_while_it_waits_is_noticed_at_once(at: int, comments: int, prompts: int) -> None:
    async def work() -> None:
        slow = Slow(at)
        asked = call(slow, prompts=prompts)
        while len(slow.completer.seen) < prompts:
            await asyncio.sleep(0)
        written = b""
        if comments:
            assert await asked.status() == 200
        while written.count(b": waiting") < comments:
            written += await asked.write()
        assert not slow.completer.closed
        asked.leave()
        await asked.task
        assert len(slow.completer.closed) == prompts

    run(work)


@pytest.mark.parametrize("break_at", [1, 2, 3, 4])
def test_a_socket_that_breaks_at_any_comment_closes_the_generation(break_at: int) -> None:
    async def work() -> None:
        slow = Slow(0)
        asked = call(slow, break_at=break_at)
        if break_at > 2:
            # Only a later comment meets the broken socket: the client is gone, and its connection says so.
            await until(lambda: asked.writes.qsize() >= break_at - 1)
            asked.leave()
        await asked.task
        assert len(slow.completer.closed) == 1

    run(work)


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.001)


def test_a_server_that_cancels_a_waiting_call_closes_the_generation() -> None:
    async def work() -> None:
        for comments in (0, 1):
            slow = Slow(0)
            asked = call(slow)
            if comments:
                await asked.status()
            else:
                await until(lambda slow=slow: bool(slow.completer.seen))
            asked.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked.task
            assert len(slow.completer.closed) == 1

    run(work)


@pytest.mark.parametrize("ask", PATHS)
def test_an_answer_in_one_piece_just_waits(ask: str) -> None:
    async def work() -> None:
        slow = Slow(0)
        asked = call(slow, ask, stream=False)
        await asyncio.sleep(5 * COMMENT_S)
        assert asked.writes.empty()
        slow.go.set()
        assert await asked.status() == 200
        assert TEXT in json.dumps(json.loads(await rest(asked)))

    run(work)


def test_a_client_that_does_not_read_gets_no_pile_of_comments() -> None:
    async def work() -> None:
        slow = Slow(1)
        asked = call(slow, buffer=2)
        await until(lambda: asked.writes.full())
        await asyncio.sleep(10 * COMMENT_S)
        asked.leave()
        await asked.task
        assert asked.sent <= 4, "one write waits for the client, and no other comes behind it"

    run(work)


def test_the_choice_with_the_most_before_it_is_the_one_that_is_told() -> None:
    async def work() -> None:
        slow = Slow(0)
        places = {"0": 3, "1": None, "2": 8}
        slow.completer.ahead = lambda id: places[id[-1]]  # type: ignore[method-assign, assignment, return-value]
        asked = call(slow, prompts=3)
        await asked.status()
        assert await asked.write() == b": waiting, 8 ahead\n\n"
        asked.leave()
        await asked.task

    run(work)
