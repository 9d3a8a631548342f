"""The asyncio shell over in-process ports: batching, one stream per group, loss and return, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace

import pytest

from cluster.errors import ApiError
from cluster.requests.work import Endurance
from tests.inprocess import FAST, LEASE_S, InProcessCluster, InProcessEngine, check, generation


def run(case: Callable[[], Awaitable[None]], timeout_s: float = 20.0) -> None:
    """Run an async case; afterwards no task of it may be left."""

    async def guarded() -> None:
        before = asyncio.all_tasks()
        async with asyncio.timeout(timeout_s):
            await case()
        left = asyncio.all_tasks() - before
        assert not left, [task.get_name() for task in left]

    asyncio.run(guarded())


def test_requests_share_one_stream_per_group_and_one_call_per_tick() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = [cluster.add("a", max_num_seqs=32), cluster.add("b", max_num_seqs=32)]
            prompts = [(1, n, 3, 4) for n in range(40)]
            results = await asyncio.gather(*(cluster.generate(f"r{p[1]}", 20, p) for p in prompts))
            for prompt, events in zip(prompts, results, strict=True):
                check(events, 20, prompt)
            assert cluster.port.calls["place"] == 1
            assert cluster.port.calls["settle"] < 40
            for group in groups:
                calls = cluster.port_to(group).calls
                assert calls["submit"] == 1 and calls["subscribe"] - calls["resubscribe"] == 1
                assert len(group.engine.accepted_keys) == 20, "least committed first spreads them evenly"
                assert calls["ack"] < 15
            await cluster.settled()
            await asyncio.sleep(5 * FAST.ack_s)
            kept = [outbox._backlogs for g in groups for outbox in g.engine.outboxes()]
            assert kept == [{}, {}], "everything was acknowledged and forgotten"
            assert len(cluster.port.outcomes) == 40

    run(case)


def test_a_refusal_is_an_api_error_before_the_first_event() -> None:
    async def case() -> None:
        async with InProcessCluster(Endurance(grace_s=0.05)) as cluster:
            with pytest.raises(ApiError) as nobody:
                await cluster.generate("r1")
            assert (nobody.value.code, nobody.value.status, nobody.value.retry_after) == ("no_group", 503, 1.0)
            cluster.add("a", blocks=4)
            with pytest.raises(ApiError) as large:
                await cluster.generate("r2", 1000)
            assert large.value.status == 400 and "1003" in large.value.message
            assert cluster.requests.running == 0

    run(case)


def test_closing_the_generator_aborts_and_settles_once() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a", steps_s=0.001)
            stream = cluster.requests.generate(generation("r", 500, (1, 9)))
            assert (await anext(stream)).tokens
            await stream.aclose()
            assert cluster.requests.running == 0
            await cluster.settled()
            assert group.engine.idle
            assert len(cluster.port.outcomes) + len(cluster.port.withdrawn) == 1

    run(case)


def test_200_requests_cancelled_at_random_points_leave_nothing_behind() -> None:
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)

    async def client(cluster: InProcessCluster, number: int) -> bool:
        await asyncio.sleep(chance.random() * 0.1)
        prompt = (1, number, 2, 3)
        task = asyncio.create_task(cluster.generate(f"r{number}", 60, prompt))
        if chance.random() < 0.2:
            check(await task, 60, prompt)
            return True
        await asyncio.wait([task], timeout=chance.choice((0, 0.0005, chance.random() * 0.2)))
        task.cancel()
        try:
            check(await task, 60, prompt)
        except asyncio.CancelledError:
            return False
        return True

    async def case() -> None:
        async with InProcessCluster() as cluster:
            groups = [cluster.add(name, blocks=64, max_num_seqs=8, steps_s=0.0005) for name in "abc"]
            done = await asyncio.gather(*(client(cluster, number) for number in range(200)))
            assert 10 < sum(done) < 200, f"seed {seed}: {sum(done)} ran to their end"
            await cluster.settled()
            assert all(group.engine.idle for group in groups), f"seed {seed}"
            closed = [outcome.grant for outcome in cluster.port.outcomes] + cluster.port.withdrawn
            assert len(closed) == len(set(closed)), f"seed {seed}: a grant was closed twice"
            assert cluster.requests.running == 0

    run(case)


def test_nothing_is_submitted_before_the_subscription_stands() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a")
            port = cluster.engines[group.address] = InProcessEngine(group, "ingress-1")
            port.fail["subscribe"] = [ConnectionError(), ConnectionError()]
            cluster.requests._engines = lambda address: port
            check(await cluster.generate("r"))
            assert (port.calls["subscribe"], port.calls["submit"]) == (3, 1)
            assert [key for key, _ in group.engine.accepted_keys] == [("r", 0)]

    run(case)


def test_a_broken_stream_is_taken_up_behind_the_last_message_without_a_new_attempt() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a", steps_s=0.001)
            task = asyncio.create_task(cluster.generate("r", 100, (2, 4)))
            for _ in range(3):
                await asyncio.sleep(0.02)
                cluster.port_to(group).breaks.set()
            check(await task, 100, (2, 4))
            assert [key for key, _ in group.engine.accepted_keys] == [("r", 0)]
            assert cluster.port_to(group).calls["resubscribe"] >= 2

    run(case)


def test_long_streams_are_rotated_one_reader_at_a_time() -> None:
    async def case() -> None:
        async with InProcessCluster(rhythm=replace(FAST, rotate_messages=5)) as cluster:
            group = cluster.add("a", steps_s=0.001)
            check(await cluster.generate("r", 60, (3, 3)), 60, (3, 3))
            assert cluster.port_to(group).calls["resubscribe"] >= 3
            assert cluster.port_to(group).reading <= 1
            assert [key for key, _ in group.engine.accepted_keys] == [("r", 0)]

    run(case)


def test_a_group_that_dies_costs_a_pause_and_no_token() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            first = cluster.add("a", steps_s=0.001)
            prompts = [(5, n) for n in range(8)]
            tasks = [asyncio.create_task(cluster.generate(f"r{p[1]}", 100, p)) for p in prompts]
            await asyncio.sleep(0.03)
            second = cluster.add("b", steps_s=0.001)
            await first.kill()
            for prompt, events in zip(prompts, await asyncio.gather(*tasks), strict=True):
                check(events, 100, prompt)
            assert second.engine.accepted_keys and all(key[1] >= 1 for key, _ in second.engine.accepted_keys)

    run(case)


def test_a_group_that_comes_back_under_a_new_epoch_takes_its_requests_again() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            first = cluster.add("a", steps_s=0.001)
            task = asyncio.create_task(cluster.generate("r", 100, (5, 5)))
            await asyncio.sleep(0.03)
            await first.kill()
            await asyncio.sleep(0.05)
            again = cluster.add("a", steps_s=0.001)
            check(await task, 100, (5, 5))
            assert again.engine.epoch == 2 and again.engine.accepted_keys[0][0][1] >= 1

    run(case)


def test_a_lapsed_lease_is_noticed_and_the_request_runs_again() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a", steps_s=0.001)
            task = asyncio.create_task(cluster.generate("r", 100, (6, 1)))
            await asyncio.sleep(0.03)
            group.engine.unsubscribe("ingress-1")
            check(await task, 100, (6, 1))
            assert [key for key, _ in group.engine.accepted_keys] == [("r", 0), ("r", 1)]
            await cluster.settled()

    run(case)


def test_leases_are_renewed_while_a_request_runs() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a", steps_s=LEASE_S / 10)  # 30 steps: three times the lease
            check(await cluster.generate("r", 30, (7, 2)), 30, (7, 2))
            assert [key for key, _ in group.engine.accepted_keys] == [("r", 0)]
            assert cluster.port_to(group).calls["renew"] >= 10

    run(case)


def test_an_unused_subscription_ends_by_itself() -> None:
    async def case() -> None:
        async with InProcessCluster(rhythm=replace(FAST, idle_s=0.05)) as cluster:
            group = cluster.add("a")
            check(await cluster.generate("r1"))
            async with asyncio.timeout(2):
                while cluster.requests._wires:
                    await asyncio.sleep(0.01)
            check(await cluster.generate("r2"))
            assert len(group.engine.accepted_keys) == 2

    run(case)


def test_a_slow_reader_finds_what_it_missed_in_one_event() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a")
            stream = cluster.requests.generate(generation("r", 40, (8, 8)))
            events = [await anext(stream)]
            await asyncio.sleep(0.1)
            events += [event async for event in stream]
            check(events, 40, (8, 8))
            assert len(events) == 2

    run(case)


def test_a_coordinator_that_is_away_for_a_moment_loses_nothing() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.add("a", steps_s=0.001)
            running = asyncio.create_task(cluster.generate("r1", 20, (1, 1)))
            await asyncio.sleep(0.01)
            cluster.port.down = True
            waiting = asyncio.create_task(cluster.generate("r2", 20, (1, 2)))
            check(await running, 20, (1, 1))
            assert not cluster.port.outcomes
            check(await waiting, 20, (1, 2))
            cluster.port.down = False
            await cluster.settled()
            await asyncio.sleep(1.0)  # all tries to tell it
            assert len(cluster.port.outcomes) == 1, "who went without it has nothing to tell it"

    run(case)


def test_a_submit_without_an_answer_is_made_again_as_a_new_attempt() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a")
            check(await cluster.generate("r1"))
            cluster.port_to(group).fail["submit"] = [TimeoutError(), TimeoutError()]
            check(await cluster.generate("r2"))
            assert group.engine.accepted_keys[-1][0] == ("r2", 2)
            await cluster.settled()

    run(case)


def test_a_request_that_nothing_becomes_of_ends_in_time() -> None:
    async def case() -> None:
        async with InProcessCluster(Endurance(patience_s=0.1)) as cluster:
            cluster.add("a")
            cluster.port.down = True
            with pytest.raises(ApiError, match="not done after"):
                await cluster.generate("r")
            cluster.port.down = False

    run(case)


@pytest.mark.parametrize("blocks", [512, 40], ids=["all run", "most wait"])
def test_shutting_down_ends_what_runs_and_waits_and_refuses_what_comes(blocks: int) -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.port.poll_s = 10.0
            group = cluster.add("a", steps_s=0.001, blocks=blocks)
            tasks = [asyncio.create_task(cluster.generate(f"r{n}", 500, (9, n))) for n in range(5)]
            await asyncio.sleep(0.02)
            waiting = cluster.coordinator.waiting
            assert (waiting == 0) == (blocks == 512)
            async with asyncio.timeout(2.0):
                await cluster.requests.aclose()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, ApiError) and result.code == "draining"
            with pytest.raises(ApiError):
                await cluster.generate("late")
            assert cluster.coordinator.waiting == 0
            assert len(cluster.port.outcomes) == 5 - waiting and len(cluster.port.left) == waiting
            await cluster.settled()
            assert group.engine.idle

    run(case)


def test_health_is_progress_of_some_group_of_each_model() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            cluster.requests._readiness._clock = iter(range(100)).__next__  # each look is a new one
            assert not (await cluster.requests.health()).ready
            group = cluster.add("a")
            await group.report()
            health = await cluster.requests.health()
            assert health.ready and health.groups[0].group == "a"
            cluster.coordinator.leave("a", 1, cluster.clock())
            health = await cluster.requests.health()
            assert not health.ready and "leaving" in health.groups[0].reason
            cluster.port.down = True
            assert "coordinator" in (await cluster.requests.health()).reason

    run(case)


def test_an_abort_that_got_lost_is_sent_again() -> None:
    async def case() -> None:
        async with InProcessCluster() as cluster:
            group = cluster.add("a", steps_s=0.001, blocks=512)
            stream = cluster.requests.generate(generation("r", 4000, (1, 9)))
            await anext(stream)
            cluster.port_to(group).fail["abort"] = [ConnectionError("lost"), RuntimeError("lost again")]
            await stream.aclose()
            async with asyncio.timeout(2.0):
                while not group.engine.idle:
                    await asyncio.sleep(0.01)
            await cluster.settled()

    run(case)


def test_what_many_requests_share_does_not_belong_to_the_request_that_happened_to_start_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    seen: dict[str, set[str]] = {}

    def spy(kind: type, name: str) -> None:
        call = getattr(kind, name)

        def spying(self: object, *arguments: object) -> Awaitable[object]:
            seen.setdefault(name, set()).add(caller.get())
            return call(self, *arguments)

        monkeypatch.setattr(kind, name, spying)

    async def case() -> None:
        async with InProcessCluster() as cluster:
            for name in ("subscribe", "submit", "abort", "ack"):
                spy(InProcessEngine, name)
            for name in ("place", "settle"):
                spy(type(cluster.port), name)
            cluster.add("a", steps_s=0.001, blocks=512)

            async def client() -> None:
                caller.set("request")
                stream = cluster.requests.generate(generation("r", 4000, (1, 9)))
                await anext(stream)
                await stream.aclose()

            await asyncio.create_task(client())
            await cluster.settled()

    run(case)
    assert seen.keys() >= {"subscribe", "submit", "abort", "place", "settle"}
    assert set().union(*seen.values()) == {"nobody"}
