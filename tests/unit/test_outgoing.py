"""What the coordinator is told of grants: each one's end once, however often an answer names it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from cluster.coordination.grants import Outcome
from cluster.requests.crew import Crew
from cluster.requests.outgoing import KEPT, Outgoing
from cluster.requests.ports import CoordinatorPort
from workers.plan import Finish


class Told:
    """What came through."""

    def __init__(self) -> None:
        self.settled: list[str] = []
        self.withdrawn: list[str] = []

    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        self.settled += [outcome.grant for outcome in outcomes]

    async def withdraw(self, grants: tuple[str, ...]) -> None:
        self.withdrawn += grants


def told_by(work: Any) -> Told:
    async def case() -> Told:
        told = Told()
        crew = Crew("test")
        work(Outgoing(cast(CoordinatorPort, told), crew))
        for _ in range(3):
            await asyncio.sleep(0)
        await crew.dismiss()
        return told

    return asyncio.run(case())


def test_a_grant_that_comes_twice_is_given_back_once() -> None:
    def work(outgoing: Outgoing) -> None:
        outgoing.withdraw("a")
        outgoing.withdraw("b")
        outgoing.withdraw("a")

    assert told_by(work).withdrawn == ["a", "b"]


def test_a_grant_that_has_ended_is_not_given_back() -> None:
    def work(outgoing: Outgoing) -> None:
        outgoing.settle(Outcome("a", Finish.ABORT, 1, 0, 0))
        outgoing.withdraw("a")

    told = told_by(work)
    assert (told.settled, told.withdrawn) == (["a"], [])


def test_what_is_remembered_is_bounded() -> None:
    def work(outgoing: Outgoing) -> None:
        for number in range(KEPT + 1):
            outgoing.withdraw(str(number))
        outgoing.withdraw(str(KEPT))
        outgoing.withdraw("0")

    assert told_by(work).withdrawn == [*(str(number) for number in range(KEPT + 1)), "0"]
