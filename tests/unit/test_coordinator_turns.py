"""The coordinator's line: whose turn it is, who is passed and for how long, who must run alone, and several groups."""

from __future__ import annotations

import pytest

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Refusal
from cluster.coordination.terms import Bounds
from tests.coordination import (
    Listener,
    answer,
    ask,
    card,
    full,
    outcome,
    placed,
    queued,
    running,
    tenant,
    terms,
)
from workers.sequence import Priority

# -- whose turn it is -------------------------------------------------------------------------------------------------


def turns(coordinator: Coordinator, grants: list[Grant], asks: list[Ask], count: int) -> list[str]:
    """Let `asks` wait, then end one running request after another."""
    for one in asks:
        queued(coordinator, one)
    listener, served, live = Listener(coordinator), [], list(grants)
    for _ in range(count):
        coordinator.settle([outcome(live.pop(0))], 1.0)
        for found in listener.hear(1.0):
            assert isinstance(found, Grant)
            served.append(found.request)
            live.append(found)
    return served


def test_room_goes_to_the_better_class_first_and_to_tenants_in_turn() -> None:
    coordinator, grants = full()
    asks = [ask(f"b{number}", priority=Priority.BATCH) for number in range(2)]
    asks += [ask(f"x{number}", share=tenant("x")) for number in range(4)]
    asks += [ask(f"y{number}", share=tenant("y", 2.0)) for number in range(4)]
    served = turns(coordinator, grants, asks, 9)
    assert sorted(name[0] for name in served[:6]) == list("xxyyyy")
    assert served[8:] == ["b0"] and served.index("x0") < 2


def test_an_interactive_newcomer_is_granted_before_batch_work_that_waits() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("batch", priority=Priority.BATCH))
    queued(coordinator, ask("now"), 0.5)
    coordinator.settle([outcome(grants[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == ["now"]


def test_a_small_newcomer_does_not_overtake_another_that_would_fit() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(max_num_seqs=20), 0.0)
    first = placed(coordinator, ask("first", prompt=16, most=112))
    queued(coordinator, ask("big", prompt=64, most=64))
    placed(coordinator, ask("small1"))
    queued(coordinator, ask("small2"))
    queued(coordinator, ask("small3"), 0.1)
    coordinator.settle([outcome(first)], 1.0)
    assert Listener(coordinator).granted(1.0) == ["big"]


@pytest.mark.parametrize("bypasses", [1, 3, 8])
def test_a_big_request_is_passed_by_so_many_and_no_more(bypasses: int) -> None:
    coordinator = Coordinator(terms(bypasses=bypasses, bypass_s=1000.0))
    coordinator.join(card(max_num_seqs=20), 0.0)
    running_now = [placed(coordinator, ask(f"s{number}")) for number in range(4)]
    queued(coordinator, ask("big", prompt=80, most=80))
    passed = 0
    while isinstance(found := answer(coordinator, ask(f"p{passed}")), Grant):
        passed += 1
        coordinator.settle([outcome(found)], 0.0)
    assert passed == bypasses
    listener = Listener(coordinator)
    for grant in running_now:
        assert listener.granted(0.0) == []
        coordinator.settle([outcome(grant)], 0.0)
    assert listener.granted(0.0) == ["big"]


def test_a_big_request_is_passed_for_so_long_and_no_longer() -> None:
    coordinator = Coordinator(terms(bypasses=1000, bypass_s=5.0))
    coordinator.join(card(max_num_seqs=20), 0.0)
    long = placed(coordinator, ask("long"))
    queued(coordinator, ask("big", prompt=80, most=80))
    for second in range(1, 40):
        coordinator.news("i", 0, float(second))
        coordinator.report(running([long], second), float(second))
        found = answer(coordinator, ask(f"p{second}"), float(second))
        if not isinstance(found, Grant):
            break
        coordinator.settle([outcome(found)], float(second))
        coordinator.tick(second + 0.5)
    assert second == 6, "its turn came at 0 s"
    coordinator.settle([outcome(long)], 7.0)
    assert [found.request for found in coordinator.news("i", 0, 7.0).answers] == ["big"]


def test_one_group_is_kept_free_and_the_others_go_on() -> None:
    coordinator = Coordinator(terms(bypasses=1))
    for name in "abcdefgh":
        coordinator.join(card(name, max_num_seqs=20), 0.0)
    small = [placed(coordinator, ask(f"s{number}")) for number in range(16)]
    queued(coordinator, ask("big", prompt=80, most=80))
    queued(coordinator, ask("big2", prompt=80, most=80))
    for number in range(20):
        found = placed(coordinator, ask(f"p{number}"))
        coordinator.settle([outcome(found)], 0.0)
    reserved = [row["group"] for row in coordinator.status(0.0)["groups"] if row["reserved"]]  # type: ignore[attr-defined]
    assert len(reserved) == 2, "one group each, a fourth of the groups at most"
    coordinator.settle([outcome(grant) for grant in small if grant.group in reserved], 1.0)
    assert sorted(Listener(coordinator).granted(1.0)) == ["big", "big2"]


@pytest.mark.parametrize("how", ["leaves", "late", "lapses", "group leaves", "group dies"])
def test_a_group_is_not_kept_free_for_one_who_is_gone_nor_forever_for_a_group_that_is(how: str) -> None:
    coordinator = Coordinator(terms(bypasses=1))
    coordinator.join(card(max_num_seqs=20), 0.0)
    long = placed(coordinator, ask("long"))
    queued(coordinator, ask("big", prompt=80, most=80, left=3.0 if how == "late" else None))
    coordinator.settle([outcome(placed(coordinator, ask("passing")))], 0.0)
    queued(coordinator, ask("next"), ingress="other")
    for second in range(1, 14):
        coordinator.report(running([long], second), float(second))
        coordinator.news("other", 0, float(second))
        if how != "lapses":
            coordinator.news("i", 0, float(second))
        coordinator.tick(float(second))
    if how == "leaves":
        coordinator.leave_line([("big", 0)], 14.0)
    elif how == "group leaves":
        coordinator.join(card("b", max_num_seqs=20), 14.0)
        coordinator.leave("a", 1, 14.0)
    elif how == "group dies":
        coordinator.join(card(max_num_seqs=20), 14.0)
    coordinator.tick(14.2)
    told = {found.request for name in ("i", "other") for found in coordinator.news(name, 0, 14.2).answers}
    assert "next" in told or coordinator.waiting == 1
    coordinator.settle([outcome(long)], 14.3)
    coordinator.tick(14.4)
    told = {found.request for name in ("i", "other") for found in coordinator.news(name, 0, 14.4).answers}
    assert ("big" in told) if how.startswith("group") else ("next" in told)


# -- alone ------------------------------------------------------------------------------------------------------------


def test_a_suspect_runs_alone_and_nothing_comes_beside_it() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("suspect", 1, alone=True, replay=True))
    queued(coordinator, ask("other"))
    for grant in grants[:-1]:
        coordinator.settle([outcome(grant)], 1.0)
        assert Listener(coordinator).hear(1.0) == [], "the group is kept free"
    coordinator.settle([outcome(grants[-1])], 1.0)
    listener = Listener(coordinator)
    (suspect,) = listener.hear(1.0)
    assert isinstance(suspect, Grant) and suspect.request == "suspect"
    queued(coordinator, ask("replay", 1, replay=True), 1.1)
    coordinator.report(running([suspect]), 1.5)
    assert listener.hear(1.5) == []
    coordinator.settle([outcome(suspect)], 2.0)
    assert sorted(listener.granted(2.0)) == ["other", "replay"]


def test_a_suspect_gets_an_idle_group_at_once_and_others_go_elsewhere() -> None:
    coordinator = Coordinator(terms())
    for name in "ab":
        coordinator.join(card(name), 0.0)
    busy = placed(coordinator, ask("busy"))
    suspect = placed(coordinator, ask("suspect", alone=True))
    assert suspect.group != busy.group
    for number in range(4):
        assert placed(coordinator, ask(str(number))).group == busy.group
    queued(coordinator, ask("4"))
    coordinator.settle([outcome(suspect)], 1.0)
    assert Listener(coordinator).granted(1.0) == ["4"]


def test_a_suspects_group_is_free_again_when_it_dies_with_it() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("suspect", 1, alone=True, replay=True))
    coordinator.settle([outcome(grant) for grant in grants], 1.0)
    coordinator.join(card(), 2.0)
    assert placed(coordinator, ask("next"), 2.0)


# -- more than one group ----------------------------------------------------------------------------------------------


def test_a_group_that_joins_takes_over_those_who_wait() -> None:
    coordinator, _ = full()
    for number in range(7):
        queued(coordinator, ask(str(number)))
    coordinator.join(card("b"), 1.0)
    granted = Listener(coordinator).hear(1.0)
    assert [found.request for found in granted] == list("01234")
    assert {found.group for found in granted if isinstance(found, Grant)} == {"b"}


def test_while_its_group_is_rebuilt_the_line_waits_for_it() -> None:
    coordinator, _ = full()
    queued(coordinator, ask("1"))
    coordinator.leave("a", 101, 1.0)
    assert coordinator.waiting == 1
    coordinator.join(card(), 5.0)
    assert Listener(coordinator).granted(5.0) == ["1"]


def test_when_the_last_group_is_forgotten_the_line_is_told() -> None:
    coordinator, _ = full(ingress_s=1000.0)
    queued(coordinator, ask("1"))
    coordinator.tick(29.0)
    assert coordinator.waiting == 1
    coordinator.tick(31.0)
    (found,) = Listener(coordinator).hear(31.0)
    assert isinstance(found, Refusal) and found.code == "no_group"


def test_who_shuns_a_group_waits_for_another() -> None:
    coordinator, grants = full()
    coordinator.join(card("b", max_num_seqs=1), 0.0)
    beside = [placed(coordinator, ask(f"b{number}")) for number in range(2)]
    queued(coordinator, ask("shy", 1, replay=True, avoid=(("a", 101),)))
    queued(coordinator, ask("other"))
    coordinator.settle([outcome(grants[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == ["other"]
    coordinator.settle([outcome(beside[0])], 2.0)
    assert [found.request for found in coordinator.news("i", 0, 2.0).answers][-1] == "shy"


def test_room_that_no_report_told_of_is_found_by_the_tick() -> None:
    coordinator = Coordinator(terms(Bounds(backlog_steps=4, watermark=0.0)))
    coordinator.join(card(max_num_seqs=100, blocks=1000, max_model_len=1000), 0.0)
    grants = [placed(coordinator, ask(str(number), prompt=128)) for number in range(2)]
    coordinator.report(running(grants, waiting_tokens=256, computed_tokens=0), 0.0)
    coordinator.report(running(grants, 2, waiting_tokens=256, computed_tokens=256), 1.0)
    queued(coordinator, ask("2", prompt=128), 1.0)
    coordinator.tick(2.0)
    assert Listener(coordinator).granted(2.0) == ["2"]


def test_a_report_that_shows_room_serves_the_line() -> None:
    coordinator, grants = full()
    queued(coordinator, ask("1"))
    coordinator.report(running(grants[1:]), 1.0)
    assert coordinator.waiting == 1, "the first was not told to have been taken: it may be on its way"
    coordinator.report(running(grants, 2), 1.5)
    coordinator.report(running(grants[1:], 3), 2.0)
    assert Listener(coordinator).granted(2.0) == ["1"]


def test_many_big_requests_at_the_head_get_groups_even_if_nobody_can_pass_them() -> None:
    coordinator = Coordinator(terms(bypass_s=5.0))
    for name in "abcdefgh":
        coordinator.join(card(name, max_num_seqs=20), 0.0)
    small = [placed(coordinator, ask(f"s{number}")) for number in range(40)]
    for number in range(40):
        queued(coordinator, ask(f"big{number}", prompt=80, most=80))
    for quarter in range(1, 30):
        coordinator.tick(quarter / 4)
        for name in "abcdefgh":
            live = [grant for grant in small if grant.group == name]
            coordinator.report(running(live, quarter, group=name), quarter / 4)
        coordinator.news("i", 0, quarter / 4)
    rows = coordinator.status(7.5)["groups"]
    assert sum(row["reserved"] for row in rows) == 2, "a fourth of them"  # type: ignore[attr-defined]


def test_a_group_kept_free_for_batch_work_still_takes_interactive_work() -> None:
    coordinator = Coordinator(terms(bypasses=1))
    coordinator.join(card(max_num_seqs=20), 0.0)
    long = placed(coordinator, ask("long"))
    queued(coordinator, ask("big", prompt=80, most=80, priority=Priority.BATCH))
    placed(coordinator, ask("passing", priority=Priority.BATCH))
    queued(coordinator, ask("held back", priority=Priority.BATCH))
    assert placed(coordinator, ask("interactive"))
    assert coordinator.status(0.0)["groups"][0]["reserved"] and long  # type: ignore[index]
