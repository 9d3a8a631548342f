"""The long poll by itself: what counts as a lost line, what is acknowledged, when it begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cluster.coordination.grants import Grant, LineNews, Refusal
from cluster.requests import line
from cluster.requests.line import LineWatch

GRANT = Grant("a/1/1", "r", 0, "a", 1, "at-a", 2, 5.0)
REFUSAL = Refusal("s", 0, "timed_out", "late")


class Poll:
    """A coordinator that says `script`, one entry per poll, then nothing any more."""

    def __init__(self, script: Sequence[LineNews | Exception]) -> None:
        self.script = list(script)
        self.acked: list[int] = []
        self.told: list[Grant | Refusal | str] = []
        self.watch = LineWatch(
            self,  # type: ignore[arg-type]
            deliver=self.told.append,
            lost=lambda: self.told.append("lost"),
            waiting=lambda: bool(self.script),
        )

    async def news(self, acked: int) -> LineNews:
        self.acked.append(acked)
        await asyncio.sleep(0)
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def run(self, sessions: int = 1) -> list[Grant | Refusal | str]:
        async def case() -> None:
            for _ in range(sessions):
                self.watch.begin()
                self.watch.begin()
                while self.watch.active:
                    await asyncio.sleep(0.001)
            await self.watch.close()

        asyncio.run(case())
        return self.told


def test_what_was_heard_is_acknowledged_with_the_next_poll() -> None:
    poll = Poll([LineNews(1, 7), LineNews(2, 7, (GRANT,)), LineNews(3, 7, (REFUSAL,)), LineNews(3, 7)])
    assert poll.run() == ["lost", GRANT, REFUSAL], "the first life of all makes tickets before it void"
    assert poll.acked == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "said", [LineNews(5, 8), LineNews(9, 8), LineNews(2, 7), LineNews(1, -1)], ids=["life", "later", "number", "both"]
)
def test_another_life_or_a_number_behind_ours_is_a_lost_line(said: LineNews) -> None:
    poll = Poll([LineNews(5, 7), said, LineNews(said.number, said.life)])
    assert poll.run() == ["lost", "lost"]
    assert poll.acked == [0, 5, said.number]


def test_answers_that_come_with_another_life_are_heard_before_the_others_ask_again() -> None:
    assert Poll([LineNews(1, 7), LineNews(2, 8, (GRANT,))]).run() == ["lost", GRANT, "lost"]


def test_a_poll_that_fails_is_a_lost_line_and_the_next_waits_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "REST_S", 0.01)
    poll = Poll([LineNews(4, 7), ConnectionError("down"), LineNews(4, 7, (GRANT,))])
    assert poll.run(sessions=2) == ["lost", "lost", GRANT]
    assert poll.acked == [0, 4, 4]


def test_a_poll_that_does_not_come_back_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "NEWS_S", 0.01)
    poll = Poll([LineNews(1, 7)])

    async def never(acked: int) -> LineNews:
        await asyncio.Event().wait()
        raise AssertionError

    poll.news = never  # type: ignore[method-assign]
    assert poll.run() == ["lost"]


def test_nobody_waiting_means_no_poll() -> None:
    poll = Poll([])
    assert poll.run() == [] and poll.acked == []


def test_closing_ends_a_poll_under_way() -> None:
    async def case() -> None:
        poll = Poll([LineNews(1, 7)])
        began = asyncio.Event()

        async def never(acked: int) -> LineNews:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        poll.news = never  # type: ignore[method-assign]
        poll.watch.begin()
        await began.wait()
        await poll.watch.close()
        assert not poll.watch.active and poll.told == []

    asyncio.run(case())
