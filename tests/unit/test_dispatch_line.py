"""The shell and the waiting line: one long poll, answers told again, a coordinator that comes back as another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cluster.coordination.grants import Grant, LineNews
from cluster.coordination.terms import Bounds, CoordinatorTerms, LineBounds
from cluster.errors import ApiError
from cluster.generation import Generation
from cluster.requests import line
from tests.inprocess import InProcessCluster, InProcessCoordinator, check, generation
from tests.unit.test_dispatch import run
from workers.sequence import Priority

PROMPTS = [(1, n, 3) for n in range(30)]


def crowd(cluster: InProcessCluster, most: int = 20) -> list[asyncio.Task[None]]:
    """More clients than the group below has room for; each checks what it gets."""

    async def client(prompt: tuple[int, ...]) -> None:
        check(await cluster.generate(f"r{prompt[1]}", most, prompt), most, prompt)

    return [asyncio.create_task(client(prompt)) for prompt in PROMPTS]


def small(cluster: InProcessCluster, name: str = "a"):  # type: ignore[no-untyped-def]
    return cluster.add(name, max_num_seqs=2, steps_s=0.001)


def closed_once(cluster: InProcessCluster) -> None:
    closed = [outcome.grant for outcome in cluster.port.outcomes] + cluster.port.withdrawn
    assert not [grant for grant, times in Counter(closed).items() if times > 1]
    assert "" not in closed


async def until(what) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.005)


def watched(port: InProcessCoordinator) -> list[int]:
    """How many polls were under way whenever one began."""
    under_way, seen, news = [0], [], port.news

    async def counting(acked: int) -> LineNews:
        under_way[0] += 1
        seen.append(under_way[0])
        try:
            return await news(acked)
        finally:
            under_way[0] -= 1

    port.news = counting  # type: ignore[method-assign]
    return seen


def test_all_that_wait_share_one_poll_which_ends_with_the_last_of_them() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            seen = watched(cluster.port)
            small(cluster)
            check(await cluster.generate("first"))
            assert not seen, "nobody waited"
            await asyncio.gather(*crowd(cluster))
            assert set(seen) == {1}
            assert cluster.port.calls["place"] < 10
            await until(lambda: not cluster.requests._line.active)
            polls = len(seen)
            check(await cluster.generate("last"))
            assert len(seen) == polls
            await cluster.settled()
            closed_once(cluster)

    run(case)


def test_who_waits_can_be_told_how_many_stand_before_it() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            small(cluster)
            tasks = crowd(cluster)
            await until(lambda: cluster.requests.ahead("r29"))
            assert cluster.requests.ahead("r0") is None and cluster.requests.ahead("nobody") is None
            await asyncio.gather(*tasks)
            assert cluster.requests.ahead("r29") is None

    run(case)


@pytest.mark.parametrize("broken", ["the answers", "some calls", "all calls for a while"])
def test_answers_that_got_lost_are_told_again(broken: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)

    async def case() -> None:
        async with InProcessCluster() as cluster:
            small(cluster)
            news, failures = cluster.port.news, [0]

            async def flaky(acked: int) -> LineNews:
                found = await news(acked) if broken == "the answers" else None
                if failures[0] < 12 and (broken == "all calls for a while" or chance.random() < 0.5):
                    failures[0] += 1
                    raise ConnectionError("lost on the way")
                return found or await news(acked)

            cluster.port.news = flaky  # type: ignore[method-assign]
            line.REST_S, rest = 0.005, line.REST_S
            try:
                await asyncio.gather(*crowd(cluster))
            finally:
                line.REST_S = rest
            assert failures[0], f"seed {seed}"
            await cluster.settled()
            closed_once(cluster)

    run(case)


def test_news_that_are_told_twice_are_heard_once() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            small(cluster)
            news = cluster.port.news

            async def forgetful(acked: int) -> LineNews:
                return await news(max(0, acked - 3))

            cluster.port.news = forgetful  # type: ignore[method-assign]
            await asyncio.gather(*crowd(cluster))
            await cluster.settled()
            (group,) = cluster.groups.values()
            assert len(group.engine.accepted_keys) == len(PROMPTS)

    run(case)


@pytest.mark.parametrize("away_s", [0.0, 0.3])
def test_a_coordinator_that_comes_back_as_another_is_asked_again_by_all_that_waited(away_s: float) -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            small(cluster)
            tasks = crowd(cluster)
            await until(lambda: cluster.coordinator.waiting > 20)
            asked = cluster.port.calls["place"]
            cluster.port.down = away_s > 0
            cluster.restart_coordinator(1000)
            await asyncio.sleep(away_s)
            cluster.port.down = False
            await asyncio.gather(*tasks)
            assert cluster.port.calls["place"] > asked
            assert cluster.coordinator.waiting == 0
            await cluster.settled()
            closed_once(cluster)

    run(case)


def test_an_ingress_that_did_not_listen_for_too_long_finds_its_places_again() -> None:
    async def case() -> None:
        async with InProcessCluster(terms=CoordinatorTerms(line=LineBounds(ingress_s=0.05))) as cluster:
            small(cluster)
            news, deaf = cluster.port.news, [True]

            async def late(acked: int) -> LineNews:
                if deaf[0]:
                    deaf[0] = False
                    await asyncio.sleep(0.2)
                    assert cluster.coordinator.waiting == 0, "its places are gone"
                return await news(acked)

            cluster.port.news = late  # type: ignore[method-assign]
            cluster.port.poll_s = 0.02
            await asyncio.gather(*crowd(cluster))
            await cluster.settled()

    run(case)


@pytest.mark.parametrize("way", ["the client leaves", "the deadline passes"])
def test_who_ends_while_it_waits_gives_its_place_back(way: str) -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a", max_num_seqs=1, steps_s=0.01, blocks=64)
            running = cluster.requests.generate(generation("long", 800, (1, 1)))
            await anext(running)
            timeout = 0.1 if way == "the deadline passes" else None
            wants = [
                Generation(f"w{n}", (2, n), generation("x", 200).sampling, "m", timeout_s=timeout) for n in range(8)
            ]

            async def client(want: Generation) -> None:
                async for event in cluster.requests.generate(want):
                    raise AssertionError(f"it must not run: {event}")

            tasks = [asyncio.create_task(client(want)) for want in wants]
            await until(lambda: cluster.coordinator.waiting >= 7)
            if timeout is None:
                for task in tasks:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if timeout is not None:
                assert {result.code for result in results if isinstance(result, ApiError)} == {"timed_out"}
                assert all(isinstance(result, ApiError) and result.status == 504 for result in results)
            await until(lambda: cluster.coordinator.waiting == 0)
            assert cluster.port.calls["leave_line"] == 1 or timeout is not None, "one call for all of a tick"
            await running.aclose()
            await cluster.settled()

    run(case)


def test_a_full_line_is_an_honest_refusal_and_what_is_in_it_finishes() -> None:
    async def case() -> None:
        terms = CoordinatorTerms(line=LineBounds(requests=10))
        async with InProcessCluster(terms=terms) as cluster:
            small(cluster)
            results = await asyncio.gather(*crowd(cluster), return_exceptions=True)
            refused = [result for result in results if result is not None]
            assert 0 < len(refused) < 25
            for refusal in refused:
                assert isinstance(refusal, ApiError) and refusal.code == "cluster_full"
                assert refusal.retry_after is not None and refusal.retry_after > 0
            await cluster.settled()

    run(case)


def test_replays_find_room_in_a_full_line_and_go_first() -> None:
    async def case() -> None:
        terms = CoordinatorTerms(line=LineBounds(requests=30))
        async with InProcessCluster(terms=terms) as cluster:
            first = small(cluster)
            tasks = crowd(cluster)
            await until(lambda: len(first.engine.accepted_keys) >= 2 and cluster.coordinator.waiting > 20)
            small(cluster, "b")
            await first.kill()
            await asyncio.gather(*tasks)

    run(case)


def test_classes_are_told_to_the_line() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a", max_num_seqs=1, steps_s=0.001)
            sampling = generation("x", 20).sampling
            order: list[str] = []

            async def client(name: str, priority: Priority) -> None:
                async for _ in cluster.requests.generate(Generation(name, (1, 2), sampling, "m", priority=priority)):
                    pass
                order.append(name)

            first = cluster.requests.generate(generation("first", 60))
            await anext(first)
            batch = [asyncio.create_task(client(f"batch{n}", Priority.BATCH)) for n in range(3)]
            await until(lambda: cluster.coordinator.waiting >= 2)
            urgent = asyncio.create_task(client("urgent", Priority.INTERACTIVE))
            await first.aclose()
            await asyncio.gather(urgent, *batch)
            assert order.index("urgent") <= 1, order

    run(case)


def test_a_grant_for_a_request_that_has_ended_is_given_back() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.requests._hear(Grant("a/1/99", "gone", 0, "a", 1, "at-a", 2, 5.0))
            await until(lambda: cluster.port.withdrawn == ["a/1/99"])

    run(case)


def test_clients_that_come_and_go_while_everything_is_flaky_leave_nothing_behind() -> None:
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)

    async def client(cluster: InProcessCluster, number: int) -> None:
        await asyncio.sleep(chance.random() * 0.3)
        prompt = (1, number, 2)
        task = asyncio.create_task(cluster.generate(f"r{number}", 30, prompt))
        if chance.random() < 0.4:
            await asyncio.wait([task], timeout=chance.random() * 0.3)
            task.cancel()
        try:
            check(await task, 30, prompt)
        except asyncio.CancelledError:
            return

    async def trouble(cluster: InProcessCluster) -> None:
        for life in range(1, 5):
            await asyncio.sleep(chance.random() * 0.15)
            cluster.port.down = True
            await asyncio.sleep(chance.random() * 0.1)
            if chance.random() < 0.6:
                cluster.restart_coordinator(1000 * life)
            cluster.port.down = False

    async def case() -> None:
        async with InProcessCluster(terms=CoordinatorTerms(bounds=Bounds(grant_s=0.5))) as cluster:
            groups = [cluster.add(name, max_num_seqs=4, steps_s=0.001) for name in "ab"]
            await asyncio.gather(trouble(cluster), *(client(cluster, number) for number in range(120)))
            assert cluster.requests.running == 0, f"seed {seed}"
            await cluster.settled()
            assert all(group.engine.idle for group in groups), f"seed {seed}"
            closed_once(cluster)

    run(case)
