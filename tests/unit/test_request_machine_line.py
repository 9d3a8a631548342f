"""One request and the waiting line: tickets, deadlines, a lost line, poison, and what it does without a coordinator."""

from __future__ import annotations

import pytest

from cluster.coordination.grants import (
    REFUSED_FULL,
    REFUSED_LATE,
    REFUSED_NEVER_FITS,
    REFUSED_NO_GROUP,
    REFUSED_STALE,
    REFUSED_TENANT,
    Grant,
    Share,
    Ticket,
)
from cluster.requests import moves
from cluster.requests.verdicts import FAILED, POISONED, TIMED_OUT
from cluster.requests.work import Endurance, Phase
from kvstore.sessions import Terms
from tests.machine_bench import PROMPT, Bench
from workers.errors import CODE_FULL, CODE_NEVER_FITS, CODE_VOID
from workers.plan import Finish
from workers.sequence import Priority

WAYS_OUT = ("the client leaves", "the deadline passes")


def start(**fields: object) -> Bench:
    bench = Bench(**fields)  # type: ignore[arg-type]
    bench.feed(moves.Started())
    return bench


def leave(bench: Bench, way: str) -> list[moves.Action]:
    if way == "the client leaves":
        return bench.feed(moves.Cancelled())
    bench.now = 10.0
    return bench.feed(moves.Ticked())


def own(bench: Bench, group: str = "a") -> Grant:
    """A grant as an ingress gives it to itself."""
    grant = Grant("", "r", bench.machine.history.attempt, group, 1, f"at-{group}", 1, 5.0)
    bench.feed(moves.Placed(grant))
    return grant


# -- the line ----------------------------------------------------------------------------------------------------------


def test_a_ticket_waits_without_patience_and_its_grant_runs() -> None:
    bench = start(endurance=Endurance(patience_s=5.0, confirm_s=1000.0))
    bench.queue(ahead=7)
    assert bench.machine.phase is Phase.QUEUED and bench.machine.ahead == 7
    bench.now = 500.0
    assert not [action for action in bench.feed(moves.Ticked()) if not isinstance(action, moves.Wake)]
    bench.run()
    assert bench.machine.phase is Phase.RUNNING and bench.machine.ahead is None
    assert len(bench.all(moves.Submit)) == 1
    assert not bench.all(moves.Leave)


def test_patience_begins_anew_behind_the_line() -> None:
    bench = start(endurance=Endurance(patience_s=5.0, confirm_s=1000.0))
    bench.queue()
    bench.now = 500.0
    bench.feed(moves.LineLost())
    bench.feed(moves.AskLost(0))
    bench.now = 504.0
    bench.feed(moves.Ticked())
    assert bench.machine.phase is Phase.ASKING
    bench.now = 505.0
    bench.feed(moves.Ticked())
    assert bench.end.refusal is not None and bench.end.refusal.code == TIMED_OUT


def test_a_coordinator_that_was_just_restarted_is_given_time_to_hear_of_its_groups() -> None:
    bench = start(endurance=Endurance(grace_s=5.0))
    while bench.now < 5.0:
        bench.refuse(REFUSED_NO_GROUP)
        assert bench.machine.phase is Phase.RESTING
        bench.ring()
    bench.refuse(REFUSED_NO_GROUP)
    assert bench.end.refusal is not None and bench.end.refusal.code == REFUSED_NO_GROUP


@pytest.mark.parametrize("code", [REFUSED_FULL, REFUSED_TENANT, REFUSED_NO_GROUP, REFUSED_NEVER_FITS])
def test_a_refusal_in_the_line_ends_a_fresh_request_with_that_word(code: str) -> None:
    bench = start(endurance=Endurance(grace_s=0.0))
    bench.queue()
    bench.refuse(code, 7.0)
    assert bench.end.refusal is not None
    assert (bench.end.refusal.code, bench.end.refusal.retry_after) == (code, 7.0)
    assert not bench.all(moves.Leave), "the coordinator has taken it out"


def test_a_lost_line_is_asked_again_with_attempt_age_and_class() -> None:
    bench = start(priority=Priority.BATCH, urgency=3, share=Share("t", 2.0, 5), affinity=(b"s", b"h"), timeout_s=60.0)
    first = bench.last_ask
    bench.queue()
    bench.now = 4.0
    bench.feed(moves.LineLost())
    again = bench.last_ask
    assert (again.attempt, again.age, again.left, again.replay) == (0, 4.0, 56.0, False)
    for name in ("priority", "urgency", "share", "affinity", "namespace", "prompt_tokens", "max_tokens"):
        assert getattr(again, name) == getattr(first, name)
    assert (first.share.tenant, first.urgency, first.left) == ("t", 3, 60.0)
    bench.queue()
    assert bench.machine.phase is Phase.QUEUED


@pytest.mark.parametrize("code", [REFUSED_FULL, REFUSED_TENANT, REFUSED_NO_GROUP])
def test_who_has_stood_in_a_line_that_was_lost_waits_on_when_the_new_one_is_full(code: str) -> None:
    bench = start()
    bench.queue()
    bench.feed(moves.LineLost())
    bench.refuse(code)
    assert bench.machine.phase is Phase.RESTING
    bench.ring()
    bench.run()
    assert bench.machine.phase is Phase.RUNNING


def test_a_lost_line_means_nothing_to_what_does_not_wait_in_it() -> None:
    running = start()
    running.run()
    resting = start()
    resting.feed(moves.AskLost(0))
    for bench in (running, resting):
        assert bench.feed(moves.LineLost()) == []


def test_an_ask_under_way_is_made_again_when_the_line_is_lost_and_one_grant_of_two_is_used() -> None:
    bench = start()
    bench.feed(moves.LineLost())
    assert len(bench.all(moves.Place)) == 2
    first = bench.place()
    second = bench.grant()
    assert bench.feed(moves.Placed(second)) == [moves.Withdraw(second.id)]
    assert bench.feed(moves.Placed(first)) == [], "the same one again"
    assert len(bench.all(moves.Submit)) == 1


def test_a_ticket_that_comes_behind_the_grant_is_no_step_back() -> None:
    bench = start()
    bench.feed(moves.LineLost())
    bench.run()
    assert bench.feed(moves.Placed(Ticket("r", 0))) == []
    assert bench.machine.phase is Phase.RUNNING


def test_a_place_in_the_line_is_confirmed_now_and_then() -> None:
    bench = start(endurance=Endurance(confirm_s=20.0))
    bench.queue()
    assert bench.alarm == 20.0
    (place, *_) = bench.ring()
    assert isinstance(place, moves.Place) and place.ask.attempt == 0
    assert bench.machine.phase is Phase.QUEUED and bench.alarm == 40.0
    bench.queue(ahead=1)
    assert bench.machine.ahead == 1


def test_a_coordinator_that_knows_an_attempt_no_more_gets_the_next_one() -> None:
    bench = start()
    bench.queue()
    bench.refuse(REFUSED_STALE, None)
    assert bench.machine.phase is Phase.ASKING and bench.last_ask.attempt == 1
    assert not bench.last_ask.replay, "no group had taken it"


# -- leaving it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("queued", [True, False])
def test_who_leaves_while_it_waits_or_asks_leaves_the_line(way: str, queued: bool) -> None:
    bench = start(timeout_s=10.0)
    if queued:
        bench.queue()
    actions = leave(bench, way)
    assert actions[0] == moves.Leave("r", 0) and isinstance(actions[1], moves.End)
    assert actions[-1] == moves.Wake(None)
    refusal = bench.end.refusal
    assert (refusal.code if refusal else None) == (TIMED_OUT if way == WAYS_OUT[1] else None)


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_ticket_on_its_way_when_the_request_ends_is_given_back(way: str) -> None:
    bench = start(timeout_s=10.0)
    leave(bench, way)
    assert bench.feed(moves.Placed(Ticket("r", 0))) == [moves.Leave("r", 0)]
    grant = bench.grant()
    assert bench.feed(moves.Placed(grant)) == [moves.Withdraw(grant.id)]


@pytest.mark.parametrize("way", WAYS_OUT)
def test_who_has_its_answer_has_no_place_to_leave(way: str) -> None:
    refused = start(timeout_s=10.0)
    refused.queue()
    refused.feed(moves.LineLost())
    refused.refuse(REFUSED_FULL)
    running = start(timeout_s=10.0)
    running.queue()
    running.run()
    for bench in (refused, running):
        leave(bench, way)
        assert bench.end and not bench.all(moves.Leave)


# -- the deadline ------------------------------------------------------------------------------------------------------


def test_a_deadline_of_its_own_goes_before_the_servers() -> None:
    assert start(timeout_s=3.0, endurance=Endurance(timeout_s=9.0)).alarm == 3.0
    assert start(endurance=Endurance(timeout_s=9.0)).alarm == 9.0


def test_what_is_left_goes_with_ask_and_request_and_so_do_the_terms() -> None:
    terms = Terms(tenant=b"t", session_blocks=4)
    bench = start(timeout_s=10.0, terms=terms)
    bench.now = 4.0
    bench.run()
    submit = bench.all(moves.Submit)[0]
    assert isinstance(submit, moves.Submit)
    assert (bench.last_ask.left, submit.request.left, submit.request.terms) == (10.0, 6.0, terms)


def test_a_deadline_that_the_coordinator_sees_first_is_the_same_end() -> None:
    bench = start(timeout_s=10.0)
    bench.queue()
    bench.refuse(REFUSED_LATE, None)
    assert bench.end.refusal is not None and bench.end.refusal.code == TIMED_OUT
    assert not bench.all(moves.Leave)


@pytest.mark.parametrize(("now", "code"), [(10.0, TIMED_OUT), (5.0, FAILED)])
def test_a_groups_error_behind_the_deadline_is_the_deadline(now: float, code: str) -> None:
    bench = start(timeout_s=10.0)
    bench.run()
    bench.now = now
    bench.arrive(0, finish=Finish.ERROR, error="the deadline has passed")
    assert bench.machine.fault == code
    if code == TIMED_OUT:
        assert bench.end.refusal is not None and bench.end.refusal.code == TIMED_OUT


def test_tokens_that_come_with_a_late_error_are_shown_before_the_end() -> None:
    bench = start(timeout_s=10.0)
    bench.run()
    bench.now = 10.0
    emit, *_, end, _ = bench.arrive(0, 10, 11, finish=Finish.ERROR, error="the deadline has passed")
    assert isinstance(emit, moves.Emit) and emit.event.tokens == (10, 11)
    assert isinstance(end, moves.End) and end.event is not None
    assert (end.event.index, end.event.tokens, end.event.finish) == (2, (), Finish.ERROR)


def test_a_replay_waits_for_as_long_as_its_deadline_allows() -> None:
    bench = start(timeout_s=600.0, endurance=Endurance(patience_s=10.0))
    bench.run()
    bench.arrive(0, 10)
    bench.die()
    while bench.now < 550.0:
        bench.refuse(REFUSED_NO_GROUP)
        assert bench.machine.phase is Phase.RESTING
        bench.ring()
    bench.run(epoch=2)
    assert bench.machine.phase is Phase.RUNNING


# -- replays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [REFUSED_FULL, REFUSED_TENANT, REFUSED_NO_GROUP, REFUSED_NEVER_FITS])
@pytest.mark.parametrize("sent", [True, False])
def test_a_replay_never_ends_on_a_refusal_of_admission(code: str, sent: bool) -> None:
    bench = start(endurance=Endurance(patience_s=10.0))
    bench.run()
    if sent:
        bench.arrive(0, 10)
    bench.die()
    assert bench.last_ask.replay
    while not bench.all(moves.End):
        bench.refuse(code)
        bench.ring()
    assert bench.now >= 10.0, "it waited for as long as it may"
    assert bench.machine.fault == (TIMED_OUT if code != REFUSED_NO_GROUP else REFUSED_NO_GROUP)
    assert (bench.end.refusal is None) == sent


def test_a_replay_may_wait_in_the_line() -> None:
    bench = start()
    bench.run()
    bench.arrive(0, 10)
    bench.die()
    bench.queue()
    bench.now = 300.0
    bench.run(epoch=2)
    bench.arrive(1, 11, 12, 13, finish=Finish.LENGTH, epoch=2)
    assert bench.end.event is not None and bench.machine.output == [10, 11, 12, 13]


def test_a_prefill_that_asks_for_no_token_is_done_when_its_group_says_so() -> None:
    bench = start(most=0)
    bench.run()
    bench.die()
    assert bench.last_ask.attempt == 1 and bench.last_ask.max_tokens == 0
    bench.run(epoch=2)
    bench.arrive(0, finish=Finish.LENGTH, epoch=2, cached=0)
    assert bench.end.event is not None and bench.end.event.finish is Finish.LENGTH


def test_a_group_that_joined_again_while_it_ran_is_shunned_by_its_latest_epoch() -> None:
    bench = start()
    bench.run(epoch=1)
    bench.arrive(0, 10, epoch=5)
    bench.die(epoch=5)
    assert bench.last_ask.avoid == (("a", 5),)


# -- poison ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [True, False])
def test_two_deaths_make_it_run_alone_and_a_third_is_the_end(sent: bool) -> None:
    bench = start()
    alone = []
    for epoch in (1, 2, 3):
        alone.append(bench.last_ask.alone)
        bench.run(epoch)
        if sent and epoch == 1:
            bench.arrive(0, 10)
        bench.die(epoch)
    assert alone == [False, False, True]
    assert bench.machine.fault == POISONED
    if sent:
        assert bench.end.event is not None and bench.end.event.finish is Finish.ERROR
        assert "alone" in (bench.end.event.error or "")
    else:
        assert bench.end.refusal is not None and bench.end.refusal.retry_after is None
        assert bench.end.refusal.code == POISONED


def test_a_neighbour_runs_alone_once_and_finishes() -> None:
    bench = start()
    for epoch in (1, 2):
        bench.run(epoch)
        bench.die(epoch)
    bench.queue()
    assert bench.last_ask.alone
    bench.run(3)
    bench.arrive(0, 1, 2, 3, 4, finish=Finish.LENGTH, epoch=3)
    assert bench.machine.fault is None and bench.end.event is not None


@pytest.mark.parametrize("how", ["submitting", "not gone"])
def test_other_losses_of_a_group_make_nobody_suspect(how: str) -> None:
    bench = start()
    for epoch in (1, 2, 3, 4):
        if bench.machine.phase is Phase.RESTING:
            bench.ring()
        if how == "submitting":
            bench.place(epoch)
            bench.die(epoch)
        else:
            bench.run(epoch)
            bench.feed(moves.GroupLost("a", epoch, gone=False))
    assert bench.machine.history.deaths == 0 and not bench.last_ask.alone


# -- without a coordinator ---------------------------------------------------------------------------------------------


def test_a_grant_of_its_own_runs_and_is_closed_with_nobody() -> None:
    bench = start()
    own(bench)
    submit = bench.all(moves.Submit)[0]
    assert isinstance(submit, moves.Submit)
    assert (submit.request.grant, submit.request.granted_blocks, submit.request.prompt) == ("", 1, PROMPT)
    bench.feed(moves.Submitted(0))
    bench.arrive(0, 1, 2, 3, 4, finish=Finish.LENGTH)
    assert bench.end.event is not None and bench.closings() == []


@pytest.mark.parametrize("queued", [True, False])
def test_who_goes_without_the_coordinator_leaves_its_line(queued: bool) -> None:
    bench = start()
    if queued:
        bench.queue()
        bench.feed(moves.LineLost())
    own(bench)
    assert bench.all(moves.Leave) == [moves.Leave("r", 0)], "the coordinator may be there and have heard the ask"
    assert bench.feed(moves.Placed(Ticket("r", 0))) == [moves.Leave("r", 0)]
    assert bench.machine.phase is Phase.SUBMITTING


def test_a_grant_of_its_own_that_finds_no_room_costs_nothing_and_asks_again_at_once() -> None:
    bench = start(endurance=Endurance(misses=0))
    for group in "abc":
        own(bench, group)
        bench.feed(moves.Rejected(bench.machine.history.attempt, CODE_FULL, "full"))
        assert bench.machine.phase is Phase.ASKING
    assert [ask.ask.attempt for ask in bench.all(moves.Place)] == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert (bench.machine.history.misses, bench.closings()) == (0, [])
    assert not bench.last_ask.replay and not bench.last_ask.avoid
    bench.feed(moves.AskLost(3))
    assert bench.machine.phase is Phase.RESTING


def test_a_grant_that_the_coordinator_sends_later_is_given_back() -> None:
    bench = start()
    own(bench)
    bench.feed(moves.Submitted(0))
    late = bench.grant()
    assert bench.feed(moves.Placed(late)) == [moves.Withdraw(late.id)]
    assert bench.feed(moves.Cancelled())[0] == moves.Abort(Grant("", "r", 0, "a", 1, "at-a", 1, 5.0))


@pytest.mark.parametrize("code", [CODE_VOID, CODE_FULL])
def test_a_grant_of_the_coordinator_that_is_not_honoured_counts_as_a_miss(code: str) -> None:
    bench = start()
    grant = bench.place()
    bench.feed(moves.Rejected(0, code, "no"))
    assert bench.machine.history.misses == 1 and bench.closings() == [grant.id]
    assert bench.last_ask.replay, "it was admitted"


def test_a_group_that_can_never_hold_it_ends_it_without_a_coordinator_too() -> None:
    bench = start()
    own(bench)
    bench.feed(moves.Rejected(0, CODE_NEVER_FITS, "10 tokens too many"))
    assert bench.end.refusal is not None and bench.end.refusal.code == "never_fits"
