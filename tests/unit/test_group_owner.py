"""The owner of a group: reports when they are due, rebuilds what has died or hangs, and never depends on a coordinator
that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RpcError

from cluster import group as owner_module
from cluster.coordination.cards import Reply
from cluster.group import HANDOVER_S, REBUILDS
from cluster.incarnation import CannotStart
from tests.owned_group import FakeCoordinator, FakeIncarnation, bench
from workers.orders import GroupTerms, Orders
from workers.plan import Limits

LIMITS = Limits(3, 32, 16)


async def refuse() -> None:
    raise ConnectionError("nobody there")


async def say_nothing() -> None:
    await asyncio.Event().wait()


AWAY = pytest.mark.parametrize("away", [refuse, say_nothing])


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))  # type: ignore[arg-type]


def test_a_group_that_stands_has_joined_and_reports_in_full_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            await on.until(lambda: len(on.started[0].reports) > 2)
            assert on.started[0].entered == [1] and on.coordinator.joined[0].restarts == 0
            assert [full for *_, full in on.started[0].reports[:3]] == [True, False, False]
            assert on.coordinator.said[-1] == "ready"
        assert on.coordinator.left == [1] and on.started[0].stopped

    run(scenario())


def test_the_next_report_comes_when_the_coordinator_wants_it_and_carries_on_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        coordinator = FakeCoordinator(lambda report: Reply(True, report.epoch, ("g1",), LIMITS, beat_s=0.3))
        async with bench(monkeypatch, tmp_path, coordinator) as on:
            clock = asyncio.get_running_loop().time
            await on.until(lambda: len(coordinator.heard) == 1)
            began = clock()
            await on.until(lambda: len(coordinator.heard) == 2)
            assert 0.25 < clock() - began < 2
            assert on.started[0].reports[1] == (LIMITS, ("g1",), False)
            on.started[0].die()
            await on.until(lambda: len(on.started) == 2)
            began = clock()
            await on.until(lambda: on.started[1].reports)
            assert clock() - began < 0.25, "a new incarnation reports at once"
            assert on.started[1].reports[0] == (None, (), True)

    run(scenario())


@AWAY
def test_while_the_coordinator_is_away_the_group_lives_on_and_reports_in_full_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Callable[[], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            await on.until(lambda: len(on.coordinator.heard) > 1)
            on.coordinator.away = away
            reports = on.started[0].reports
            seen = len(reports)
            await on.until(lambda: len(reports) > seen + 2)
            assert all(full for *_, full in reports[seen + 1 :])
            await on.owner.check_health()
            on.coordinator.away = None
            heard = len(on.coordinator.heard)
            await on.until(lambda: len(on.coordinator.heard) > heard)
            assert len(on.started) == 1 and not on.started[0].killed

    run(scenario())


@AWAY
def test_a_group_that_dies_while_the_coordinator_is_away_is_rebuilt_and_joins_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Callable[[], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            on.coordinator.away = away
            on.started[0].die()
            await on.until(lambda: len(on.started) == 2)
            await asyncio.sleep(0.2)
            assert len(on.started) == 2 and len(on.coordinator.joined) == 1 and not on.started[1].killed
            on.coordinator.away = None
            await on.until(lambda: on.started[1].reports)
            assert on.coordinator.joined[-1].restarts == 1 and on.started[1].entered == [2]
            await on.owner.check_health()

    run(scenario())


def test_a_coordinator_that_has_forgotten_the_group_is_joined_again_under_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            await on.until(lambda: len(on.coordinator.heard) > 1)
            on.coordinator.reply = lambda report: Reply(report.epoch > 1, 0)
            await on.until(lambda: on.started[0].entered == [1, 2])
            seen = len(on.started[0].reports)
            await on.until(lambda: len(on.started[0].reports) > seen + 1)
            assert on.started[0].reports[seen][2], "in full to one that knows nothing"
            assert len(on.started) == 1
            on.coordinator.reply = lambda report: Reply(False, report.epoch + 5)
            joined = len(on.coordinator.joined)
            await asyncio.sleep(0.1)
            assert len(on.coordinator.joined) == joined, "another incarnation has taken over"

    run(scenario())


@pytest.mark.parametrize("hangs", [False, True])
def test_what_dies_or_hangs_is_written_down_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hangs: bool
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            if hangs:
                on.started[0].hangs = True
            else:
                on.started[0].die()
            await on.until(lambda: len(on.coordinator.joined) == 2)
            assert on.started[0].killed and on.coordinator.left == [1]
            assert on.coordinator.joined[1].restarts == 1
            assert on.started[1].name != on.started[0].name
            (lines,) = on.flights()
            assert [line["kind"] for line in lines] == ["death", "rank", "rank", "plan"]
            assert lines[0]["why"] == ("no step ended within 60 s" if hangs else "a rank died")
            assert lines[1]["step"] == 12 and lines[1]["stacks"][0]["frames"] and lines[2]["silent"] == "no answer"

    run(scenario())


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_rebuilding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        (tmp_path / "file").write_text("")
        async with bench(monkeypatch, tmp_path / "file") as on:
            on.started[0].die()
            await on.until(lambda: len(on.coordinator.joined) == 2)

    run(scenario())


@pytest.mark.parametrize("failures", range(1, REBUILDS + 1))
def test_only_after_two_failed_attempts_in_a_row_serve_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: int
) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            for _ in range(2):
                await on.owner.check_health()
                on.failures.extend([CannotStart("no weights")] * failures)
                on.started[-1].die()
                await on.until(lambda: not on.failures)
                if failures == REBUILDS:
                    break
                count = len(on.started)
                await on.until(lambda count=count: len(on.coordinator.joined) == count + 0 and on.started[-1].reports)
            if failures < REBUILDS:
                await on.owner.check_health()
                assert on.coordinator.joined[-1].restarts == 2, "attempts that failed do not count"
                return
            await on.until(lambda: on.coordinator.said[-1] == "no weights")
            with pytest.raises(RuntimeError, match="cannot be rebuilt: no weights"):
                await on.owner.check_health()

    run(scenario())


def test_a_group_that_dies_as_it_enters_is_killed_whole_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        from ray.exceptions import RayActorError

        enter = FakeIncarnation.enter

        async def fail_second(self: FakeIncarnation, epoch: int) -> None:
            if epoch == 2:
                raise RayActorError()
            await enter(self, epoch)

        monkeypatch.setattr(FakeIncarnation, "enter", fail_second)
        async with bench(monkeypatch, tmp_path) as on:
            on.started[0].die()
            await on.until(lambda: len(on.started) == 3 and on.started[2].reports)
            assert on.started[1].killed

    run(scenario())


def test_supervision_that_fails_is_told_to_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:

            async def explode() -> None:
                raise KeyError("a bug")

            monkeypatch.setattr(on.owner, "_rebuild", explode)
            on.started[0].die()
            await on.until(lambda: on.owner._broken)
            with pytest.raises(RuntimeError, match="a bug"):
                await on.owner.check_health()

    run(scenario())


@AWAY
def test_a_replica_that_is_stopped_while_it_rebuilds_leaves_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: Callable[[], Awaitable[None]]
) -> None:
    """Here it has its ranks, and waits for the coordinator to take them."""

    async def scenario() -> None:
        async with bench(monkeypatch, tmp_path) as on:
            on.coordinator.away = away
            on.started[0].die()
            await on.until(lambda: len(on.started) == 2)
            assert not on.started[1].killed
        assert on.started[1].killed and on.started[0].stopped

    run(scenario())


def no_answer() -> float | None:
    raise RpcError("no GCS")


@pytest.mark.parametrize(
    ("seconds_left", "within_s"),
    [
        (lambda: None, 1.0),
        (lambda: 600.0, 1.0),
        (lambda: HANDOVER_S + 0.3, 0.3),
        (lambda: HANDOVER_S - 1.0, 0.0),
        (lambda: -60.0, 0.0),
        (no_answer, 1.0),
    ],
)
def test_running_requests_may_end_within_a_bounded_time_which_is_over_before_their_node_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds_left: Callable[[], float | None], within_s: float
) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with bench(monkeypatch, tmp_path) as on:
            monkeypatch.setattr("cluster.group.seconds_left", seconds_left)
            on.started[0].busy = True
            assert await on.owner._drain_within() == pytest.approx(within_s)
            began = clock()
        assert clock() - began > within_s - 0.01
        assert on.coordinator.left == [1] and on.started[0].stopped

    run(scenario())


def test_a_group_that_has_nothing_to_do_goes_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with bench(monkeypatch, tmp_path) as on:
            began = clock()
        assert clock() - began < 1.0 and on.started[0].stopped

    run(scenario())


def test_an_order_to_build_anew_and_a_log_level_are_the_owners_business(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        coordinator = FakeCoordinator()
        levels: list[str] = []
        monkeypatch.setattr(owner_module, "set_log_level", levels.append)
        async with bench(monkeypatch, tmp_path, coordinator) as at:
            orders = Orders(3, GroupTerms(log_level="debug"))
            coordinator.reply = lambda report: Reply(True, report.epoch, orders=orders)
            await at.until(lambda: orders in at.started[0].orders)
            await at.until(lambda: len(at.started[0].orders) > 4)
            assert levels == ["debug"] == at.started[0].log_levels, "said once"
            coordinator.reply = lambda report: Reply(
                True, report.epoch, orders=replace(orders, rebuild=True) if report.epoch == 1 else None
            )
            await at.until(lambda: len(at.started) == 2 and at.started[1].entered)
            assert at.started[0].killed and not coordinator.replaced
        assert coordinator.replaced, "a replica that Serve ends makes way for another"

    run(scenario())
