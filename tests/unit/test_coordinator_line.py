"""The coordinator's line from outside: tickets, news and their acknowledgement, refusals, deadlines, who is passed."""

from __future__ import annotations

import random

import pytest

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant, Refusal, Ticket
from tests.coordination import (
    Listener,
    answer,
    ask,
    card,
    full,
    outcome,
    placed,
    queued,
    refused,
    running,
    tenant,
    terms,
)

# -- tickets and news -------------------------------------------------------------------------------------------------


def test_without_room_an_ask_gets_a_ticket_and_later_its_grant_by_news() -> None:
    coordinator, grants = full()
    assert queued(coordinator, ask("1")) == Ticket("1", 0, 0, None)
    assert queued(coordinator, ask("2")).ahead == 1
    assert coordinator.wakes() == ()
    coordinator.settle([outcome(grants[0])], 1.0)
    assert coordinator.wakes() == ("i",) and coordinator.wakes() == ()
    (found,) = Listener(coordinator).hear(1.0)
    assert isinstance(found, Grant) and (found.request, found.group, found.expires_s) == ("1", "a", 5.0)
    assert queued(coordinator, ask("3"), 2.0).wait_s is not None, "something has drained"


def test_news_go_to_the_ingress_that_asked() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("1"), ingress="x")
    queued(coordinator, ask("2"), ingress="y")
    coordinator.settle([outcome(grant) for grant in grants], 1.0)
    assert set(coordinator.wakes()) == {"x", "y"}
    assert Listener(coordinator, "y").granted(1.0) == ["2"]
    assert Listener(coordinator, "x").granted(1.0) == ["1"]


def test_news_are_told_again_until_they_are_acknowledged() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("1"))
    queued(coordinator, ask("2"))
    before = coordinator.news("i", 0, 0.5)
    assert before.answers == () and before.life == 100
    coordinator.settle([outcome(grants[0])], 1.0)
    first = coordinator.news("i", before.number, 1.0)
    coordinator.settle([outcome(grants[1])], 2.0)
    second = coordinator.news("i", before.number, 2.0)
    assert [found.request for found in first.answers] == ["1"]
    assert [found.request for found in second.answers] == ["1", "2"]
    assert second.answers[0].expires_s == 4.0, "a grant told again has less time left"  # type: ignore[union-attr]
    assert [found.request for found in coordinator.news("i", first.number, 2.0).answers] == ["2"]
    assert coordinator.news("i", second.number, 2.0).answers == ()


def test_a_grant_that_was_told_too_late_comes_as_a_stale_one() -> None:
    coordinator, grants = full(ingress_s=100.0)
    queued(coordinator, ask("1"))
    coordinator.settle([outcome(grants[0])], 1.0)
    (late,) = Listener(coordinator).hear(7.0)
    assert isinstance(late, Refusal) and late.code == "stale_attempt"
    assert answer(coordinator, ask("1", attempt=1), 4.9) is not None


def test_asking_again_keeps_the_place() -> None:
    coordinator, grants = full()
    for name in "123":
        queued(coordinator, ask(name))
    assert [queued(coordinator, ask(name)).ahead for name in "123"] == [0, 1, 2]
    assert coordinator.waiting == 3
    coordinator.settle([outcome(grants[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == ["1"]
    assert placed(coordinator, ask("1"), 2.0).expires_s == 4.0, "and afterwards the grant is the same"


def test_a_newer_attempt_takes_the_olders_place_away() -> None:
    coordinator, _ = full()
    queued(coordinator, ask("1"))
    queued(coordinator, ask("1", attempt=1, replay=True))
    assert coordinator.waiting == 1
    assert refused(coordinator, ask("1")).code == "stale_attempt"


@pytest.mark.parametrize("seed", range(10))
def test_after_a_restart_those_who_ask_with_their_age_stand_as_before(seed: int) -> None:
    chance = random.Random(seed)
    asks = [ask(str(number), age=100.0 - number) for number in range(20)]
    chance.shuffle(asks)
    coordinator, grants = full()
    for one in asks:
        queued(coordinator, one, 1.0)
    listener, served = Listener(coordinator), []
    for _ in range(20):
        coordinator.settle([outcome(grants.pop())], 2.0)
        (found,) = listener.hear(2.0)
        assert isinstance(found, Grant)
        grants.append(found)
        served.append(int(found.request))
    assert served == sorted(served)


def test_who_leaves_the_line_is_not_granted_and_a_late_copy_does_not_bring_it_back() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("1"))
    queued(coordinator, ask("2"))
    coordinator.leave_line([("1", 0), ("never came", 0)], 0.5)
    assert coordinator.waiting == 1
    assert refused(coordinator, ask("1"), 0.6).code == "stale_attempt"
    assert refused(coordinator, ask("never came"), 0.6).code == "stale_attempt"
    coordinator.settle([outcome(grants[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == ["2"]


def test_who_leaves_after_its_grant_makes_it_void_unless_it_was_taken() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("1"))
    queued(coordinator, ask("2"))
    coordinator.settle([outcome(grant) for grant in grants[:2]], 1.0)
    one, two = Listener(coordinator).hear(1.0)
    assert isinstance(one, Grant) and isinstance(two, Grant)
    coordinator.report(running([*grants[2:], two]), 1.5)
    coordinator.leave_line([("1", 0), ("2", 0)], 2.0)
    assert coordinator.report(running([*grants[2:], two], 2), 2.5).void == (one.id,)


def test_an_ingress_that_does_not_listen_loses_its_places_and_learns_of_it() -> None:
    coordinator, grants = full(ingress_s=10.0)
    coordinator.report(running(grants), 4.0)
    queued(coordinator, ask("1"), 4.0, ingress="deaf")
    queued(coordinator, ask("2"), 4.0, ingress="well")
    assert coordinator.news("deaf", 0, 4.0).life == 100
    for second in range(5, 20):
        coordinator.report(running(grants, second), float(second))
        coordinator.news("well", 1, float(second))
        coordinator.tick(float(second))
        assert coordinator.waiting == (2 if second <= 14 else 1)
    news = coordinator.news("deaf", 1, 20.0)
    assert news.life != 100 and news.answers == (), "as if the coordinator had been restarted"
    assert coordinator.news("deaf", 1, 20.0).life == news.life
    assert coordinator.news("well", 1, 20.0).life == 100


def test_an_ingress_that_waits_for_nothing_need_not_listen() -> None:
    coordinator, grants = full(ingress_s=10.0)
    queued(coordinator, ask("1"))
    listener = Listener(coordinator)
    coordinator.settle([outcome(grants[0])], 0.5)
    assert listener.granted(0.5) == ["1"]
    listener.hear(0.6)
    coordinator.report(running(grants[1:]), 40.0)
    coordinator.join(card(), 100.0)
    for number in range(5):
        placed(coordinator, ask(f"more{number}"), 100.0)
    queued(coordinator, ask("2"), 100.0)
    coordinator.tick(101.0)
    assert coordinator.waiting == 1 and coordinator.news("i", listener.acked, 101.0).life == 100


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_beyond_the_bounds_tenant_and_cluster_are_told_apart() -> None:
    coordinator, _ = full(requests=4)
    for number in range(2):
        queued(coordinator, ask(f"a{number}", share=tenant("a", most=2)))
    refusal = refused(coordinator, ask("a2", share=tenant("a", most=2)))
    assert refusal.code == "tenant_limit" and "'a'" in refusal.message
    for number in range(2):
        queued(coordinator, ask(f"b{number}", share=tenant("b")))
    refusal = refused(coordinator, ask("b2", share=tenant("b")))
    assert refusal.code == "cluster_full" and "'m'" in refusal.message
    assert refusal.retry_after is not None and 1.0 <= refusal.retry_after <= 60.0
    assert queued(coordinator, ask("r", attempt=1, replay=True)).ahead == 0


@pytest.mark.parametrize(("rate", "low", "high"), [(320.0, 0.8, 1.3), (16.0, 1.6, 2.4), (0.1, 40.0, 60.0)])
def test_the_time_to_wait_follows_the_measured_drain_and_never_exceeds_a_minute(
    rate: float, low: float, high: float
) -> None:
    coordinator, _ = full(requests=1)
    queued(coordinator, ask("1"))
    drained = coordinator._dispatch.model("m").drain
    for second in range(1, 101):
        drained.add(int(rate * 10) if rate < 10 else int(rate), float(second) - 100.0 if rate >= 10 else 0.0)
    waits = {refused(coordinator, ask(f"x{number}")).retry_after for number in range(20)}
    assert len(waits) > 5, "not all come back at once"
    if rate >= 10:
        assert all(wait is not None and low <= wait <= high for wait in waits), waits
    assert all(wait is not None and wait <= 60.0 for wait in waits)


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 40), (40,), (20, 40)])
def test_what_drains_is_as_many_tokens_whatever_blocks_its_layer_groups_hold(windows: tuple[int | None, ...]) -> None:
    coordinator = Coordinator(terms(requests=1))
    wide = card(windows=windows, blocks=400, max_num_seqs=1, max_num_batched_tokens=4096, max_model_len=2048)
    coordinator.join(wide, 0.0)
    ended, _ = (placed(coordinator, ask(f"{number}", prompt=100, most=20)) for number in range(2))
    queued(coordinator, ask("next", prompt=100, most=20))
    coordinator.settle([outcome(ended)], 1.0)
    assert Listener(coordinator).granted(1.0) == ["next"]
    assert queued(coordinator, ask("later", prompt=100, most=20), 1.0).wait_s == pytest.approx(1.0), "120 tokens in 1 s"
    wait = refused(coordinator, ask("large", prompt=1180, most=20), 1.0).retry_after
    assert wait is not None and 8.0 <= wait <= 12.0, "1200 tokens at that rate, spread by a fifth"


def test_two_models_have_lines_of_their_own() -> None:
    coordinator = Coordinator(terms(requests=1))
    coordinator.join(card("a"), 0.0)
    coordinator.join(card("b", models=("n",)), 0.0)
    for number in range(5):
        placed(coordinator, ask(f"m{number}"))
    queued(coordinator, ask("m5"))
    assert refused(coordinator, ask("m6")).code == "cluster_full"
    assert placed(coordinator, ask("n", model="n")).group == "b"


def test_who_can_never_fit_does_not_wait() -> None:
    coordinator, _ = full()
    assert refused(coordinator, ask("1", prompt=100, most=100)).code == "never_fits"


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_that_passes_in_the_line_ends_the_ticket_once() -> None:
    coordinator, grants = full()
    coordinator.report(running(grants), 2.0)
    queued(coordinator, ask("late", left=3.0))
    queued(coordinator, ask("patient", left=30.0))
    coordinator.tick(2.9)
    assert coordinator.waiting == 2
    coordinator.tick(3.0)
    listener = Listener(coordinator)
    (late,) = listener.hear(3.0)
    assert isinstance(late, Refusal) and (late.request, late.code) == ("late", "timed_out")
    coordinator.settle([outcome(grants[0])], 3.5)
    assert listener.granted(3.5) == ["patient"]
    assert refused(coordinator, ask("late", left=1.0), 4.0).code == "stale_attempt"


def test_an_ask_whose_time_is_up_is_refused_even_where_there_is_room() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(), 0.0)
    assert refused(coordinator, ask(left=0.0)).code == "timed_out"


def test_what_is_due_is_never_granted_even_without_a_tick() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("late", left=3.0))
    coordinator.settle([outcome(grant) for grant in grants], 3.5)
    (late,) = Listener(coordinator).hear(3.5)
    assert isinstance(late, Refusal)
