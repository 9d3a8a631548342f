"""The coordinator as an actor: one per service and config, found again after its death, gone when nobody calls; and the
line's long poll, which is woken from other threads and holds nobody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from ray.exceptions import RayActorError

from cluster.actors import open_coordinator
from cluster.coordination.cards import OLDEST_PROTOCOL, PROTOCOL, GroupCard, Identity
from cluster.coordination.grants import REFUSED_LATE, Ask, Grant, Outcome, Refusal, Ticket
from cluster.coordination.terms import CoordinatorTerms, LineBounds
from cluster.links import CoordinatorLink
from cluster.registry import CoordinatorMissing, end_coordinator, find_coordinator
from cluster.settings import CoordinatorSettings
from deploy.bench.coordination_ray import Fleet, measure
from tests.ray.stage import Stage, eventually
from workers.plan import Finish

SERVICE = "alone"
QUICK = CoordinatorTerms(line=LineBounds(ingress_s=2.0))
"""Polls without news come back after a second."""


def settings(config: str = "config a", *, idle_s: float = 600.0) -> CoordinatorSettings:
    return CoordinatorSettings(SERVICE, config, QUICK, idle_s)


def card(name: str = "g", *, slots: int = 1) -> GroupCard:
    return GroupCard(name, ("m",), f"at-{name}", 64, 16, slots, 512, 512)


def ask(name: str, *, left: float | None = None) -> Ask:
    return Ask(name, 0, "m", b"n", 16, 16, left=left)


@pytest.fixture
def link(stage: Stage) -> Iterator[CoordinatorLink]:
    yield CoordinatorLink(settings(), "ingress", open_coordinator(settings(), replace=True))
    end_coordinator(SERVICE)


async def group(link: CoordinatorLink, *, slots: int = 1) -> Fleet:
    """A group that reports by hand."""
    fleet = Fleet(link, [card(slots=slots)])
    await fleet.join()
    await fleet.report()
    return fleet


async def fill(link: CoordinatorLink) -> list[Grant]:
    """Ask until the next one would have to wait."""
    grants: list[Grant] = []
    while True:
        (answer,) = await link.place((ask(f"fill{len(grants)}"),))
        if not isinstance(answer, Grant):
            await link.leave_line(((f"fill{len(grants)}", 0),))
            return grants
        grants.append(answer)


def done(grant: Grant) -> Outcome:
    return Outcome(grant.id, Finish.LENGTH, 16, 0, 16)


# -- one of its kind ---------------------------------------------------------------------------------------------------


def test_a_coordinator_is_shared_by_its_config_and_replaced_by_a_deployment_of_another(stage: Stage) -> None:
    first = open_coordinator(settings("config a"))
    assert open_coordinator(settings("config a"), replace=True)._actor_id == first._actor_id
    with pytest.raises(CoordinatorMissing, match="another deployment"):
        open_coordinator(settings("config b"))
    newer = replace(settings("config a"), version="2")
    assert open_coordinator(newer)._actor_id == first._actor_id, "a replica gets along with the code that there is"
    second = open_coordinator(newer, replace=True)
    assert second._actor_id != first._actor_id, "whoever deploys other code brings it along"
    first, second = second, open_coordinator(settings("config b"), replace=True)
    assert second._actor_id != first._actor_id
    assert ray.get(second.identity.remote()) == Identity(PROTOCOL, "config b", OLDEST_PROTOCOL)
    with pytest.raises(RayActorError):
        ray.get(first.identity.remote())
    end_coordinator(SERVICE)
    with pytest.raises(CoordinatorMissing):
        eventually(lambda: find_coordinator(SERVICE) is None, 5)


def test_a_replica_of_an_old_config_does_not_join_its_successor(stage: Stage) -> None:
    async def talk() -> None:
        old = await CoordinatorLink.open(settings("old"))
        assert await old.groups() == ()
        await asyncio.to_thread(open_coordinator, settings("new"), replace=True)
        new = await CoordinatorLink.open(settings("new"))
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await old.groups()
        assert await new.groups() == ()

    asyncio.run(talk())
    end_coordinator(SERVICE)


def test_a_coordinator_whose_process_died_answers_again_under_the_same_handle(stage: Stage) -> None:
    handle = open_coordinator(settings())
    ray.kill(handle, no_restart=False)

    def answers() -> bool:
        try:
            return bool(ray.get(handle.identity.remote()).serves("config a"))
        except RayActorError:
            return False

    eventually(answers, 20)
    end_coordinator(SERVICE)


def test_a_coordinator_that_nobody_calls_ends_itself(stage: Stage) -> None:
    handle = open_coordinator(settings(idle_s=1.0))

    def gone() -> bool:
        try:
            find_coordinator(SERVICE)
        except CoordinatorMissing:
            return True
        return False

    eventually(gone, 15)
    with pytest.raises(RayActorError):
        ray.get(handle.identity.remote())


def test_news_of_groups_arrive_at_once_and_silence_ends_in_time(stage: Stage) -> None:
    handle = open_coordinator(settings())
    waiting = handle.notices.remote(0, 30.0)
    ray.get(handle.notice.remote("g", "loading weights"))
    assert [notice.text for notice in ray.get(waiting, timeout=5)] == ["loading weights"]
    assert ray.get(handle.notices.remote(1, 0.1), timeout=5) == ()
    end_coordinator(SERVICE)


# -- the line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", ["settle", "report", "join", "leave_line"])
def test_a_poll_is_woken_by_whatever_makes_room(link: CoordinatorLink, thread: str) -> None:
    async def talk() -> None:
        fleet = await group(link)
        grants = await fill(link)
        if thread == "leave_line":
            await link.place((ask("first"),))
        (ticket,) = await link.place((ask("waits"),))
        assert isinstance(ticket, Ticket)
        before = await link.news(0)
        assert before.answers == ()
        poll = asyncio.ensure_future(link.news(before.number))
        await asyncio.sleep(0.1)
        if thread == "settle":
            await link.settle(tuple(map(done, grants)))
        elif thread == "report":
            await link.withdraw(tuple(grant.id for grant in grants))
            await fleet.report(voided=tuple(grant.id for grant in grants))
        elif thread == "join":
            other = Fleet(link, [card("h")])
            await other.join()
            await other.report()
        else:
            await link.settle((done(grants[0]),))
            await link.leave_line((("first", 0),))
            await link.settle(tuple(map(done, grants[1:])))
        began = time.monotonic()
        news = await poll
        assert time.monotonic() - began < 0.5
        answers = {answer.request: answer for answer in news.answers}
        while "waits" not in answers:
            news = await link.news(news.number)
            answers = {answer.request: answer for answer in news.answers}
        assert isinstance(answers["waits"], Grant)
        assert (await link.news(news.number - 1)).answers, "what was not acknowledged is told again"
        assert (await link.news(news.number)).answers == ()

    asyncio.run(talk())


def test_deadlines_in_the_line_are_kept_by_the_actors_own_clock(link: CoordinatorLink) -> None:
    async def talk() -> None:
        await group(link)
        await fill(link)
        (ticket,) = await link.place((ask("late", left=0.3),))
        assert isinstance(ticket, Ticket)
        news = await link.news(0)
        while not news.answers:
            news = await link.news(news.number)
        (answer,) = news.answers
        assert isinstance(answer, Refusal) and answer.code == REFUSED_LATE

    asyncio.run(talk())


def test_polls_that_wait_hold_up_neither_reports_nor_asks(link: CoordinatorLink) -> None:
    async def talk() -> None:
        fleet = await group(link)
        actor = link._actor
        assert actor is not None
        polls = [asyncio.ensure_future(_as_future(actor.news.remote(f"ingress{n}", 0))) for n in range(200)]
        await asyncio.sleep(0.2)
        slowest = 0.0
        for number in range(20):
            began = time.monotonic()
            await fleet.report()
            (answer,) = await link.place((ask(f"r{number}"),))
            assert not isinstance(answer, Refusal)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.9, "a poll waits for a second"
        assert all(not news.answers for news in await asyncio.gather(*polls))

    asyncio.run(talk())


def test_ingresses_hear_of_their_own_tickets_alone(link: CoordinatorLink) -> None:
    async def talk() -> None:
        await group(link)
        grants = await fill(link)
        others = [await CoordinatorLink.open(settings()) for _ in range(2)]
        for number, other in enumerate(others):
            await other.place((ask(f"mine{number}"),))
        polls = [asyncio.ensure_future(other.news(0)) for other in others]
        await link.settle((done(grants[0]),))
        (first,) = (await polls[0]).answers
        assert first.request == "mine0"
        assert all(answer.request == "mine1" for answer in (await polls[1]).answers)

    asyncio.run(talk())


def test_a_restarted_coordinator_is_another_life_and_forgets_who_waited(link: CoordinatorLink) -> None:
    async def talk() -> None:
        await group(link)
        await fill(link)
        await link.place((ask("waits"),))
        before = await link.news(0)
        poll = asyncio.ensure_future(link.news(before.number))
        await asyncio.sleep(0.1)
        ray.kill(link._actor, no_restart=False)
        with pytest.raises(ConnectionError):
            await poll
        began, after = time.monotonic(), None
        while after is None:
            assert time.monotonic() - began < 20
            try:
                after = await link.news(before.number)
            except ConnectionError:
                await asyncio.sleep(0.05)
        assert after.life != before.life and after.answers == ()
        await group(link)
        (answer,) = await link.place((ask("waits"),))
        assert isinstance(answer, Grant)

    asyncio.run(talk())


def test_what_a_session_has_cached_is_asked_over_the_link(link: CoordinatorLink) -> None:
    async def talk() -> None:
        fleet = await group(link)
        assert await link.session((b"n",)) == ()
        await fleet.report(sessions=((b"n", 3, 60.0),))
        (copy,) = await link.session((b"n", b"other"))
        assert (copy.group, copy.blocks, copy.tokens) == ("g", 3, 48)

    asyncio.run(talk())


# -- speed -------------------------------------------------------------------------------------------------------------


def test_the_actor_is_not_much_slower_than_one_that_does_nothing(stage: Stage) -> None:
    figures = measure(seconds=1.0, rounds=2, groups=8, batches=(1, 16))
    for figure in figures:
        assert figure.pairs > 20 and figure.refused == 0
        assert figure.share > 0.25, f"{figure} (the aim is 0.7, on a quiet machine)"


async def _as_future(reference):  # type: ignore[no-untyped-def]
    return await reference
