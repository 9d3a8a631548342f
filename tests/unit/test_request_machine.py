"""One request as a pure state machine: fencing, replay, endings; every grant is closed exactly once."""

from __future__ import annotations

import pytest

from cluster.coordination.grants import Refusal
from cluster.requests import moves
from cluster.requests.verdicts import FAILED, TIMED_OUT
from cluster.requests.work import Endurance, Phase
from tests.machine_bench import Bench
from workers.plan import Finish, TokenEvent


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.feed(moves.Started())
    return made


def test_a_request_runs_from_ask_to_its_one_end(bench: Bench) -> None:
    (place,) = bench.all(moves.Place)
    assert isinstance(place, moves.Place)
    assert (place.ask.prompt_tokens, place.ask.max_tokens, place.ask.replay) == (3, 4, False)
    grant = bench.run()
    (submit,) = bench.all(moves.Submit)
    assert isinstance(submit, moves.Submit)
    assert (submit.request.grant, submit.request.granted_blocks, submit.request.resumed) == (grant.id, 2, ())
    bench.arrive(0, 10, cached=2)
    bench.arrive(1, 11, 12)
    bench.arrive(3, 13, finish=Finish.LENGTH, cached=2)
    emitted = [a.event.tokens for a in bench.seen if isinstance(a, moves.Emit)]
    assert emitted == [(10,), (11, 12)]
    assert bench.end.event == TokenEvent("r", 0, 3, (13,), Finish.LENGTH, 2)
    (settle,) = bench.all(moves.Settle)
    assert isinstance(settle, moves.Settle)
    assert (settle.outcome.finish, settle.outcome.prompt_tokens, settle.outcome.cached_tokens) == (Finish.LENGTH, 3, 2)
    assert settle.outcome.output_tokens == 4
    assert not bench.all(moves.Abort)


def test_events_may_come_before_the_answer_to_the_submit(bench: Bench) -> None:
    bench.place()
    bench.arrive(0, 1, 2, 3, 4, finish=Finish.LENGTH)
    assert bench.feed(moves.Submitted(0)) == []
    assert bench.end.event is not None


def test_a_repeated_event_is_trimmed_to_what_is_new(bench: Bench) -> None:
    bench.run()
    bench.arrive(0, 10, 11)
    assert bench.arrive(0, 10, 11) == []
    (emit,) = (a for a in bench.arrive(0, 10, 11, 12) if isinstance(a, moves.Emit))
    assert (emit.event.index, emit.event.tokens) == (2, (12,))


def test_a_gap_in_the_output_starts_a_new_attempt_behind_what_came(bench: Bench) -> None:
    first = bench.run()
    bench.arrive(0, 10)
    bench.arrive(2, 12)
    assert bench.closings() == [first.id]
    assert isinstance(bench.all(moves.Abort)[0], moves.Abort)
    bench.place()
    submit = bench.all(moves.Submit)[-1]
    assert isinstance(submit, moves.Submit)
    assert (submit.request.attempt, submit.request.resumed) == (1, (10,))


def test_a_refusal_ends_a_fresh_request(bench: Bench) -> None:
    refusal = Refusal("r", 0, "cluster_full", "full", 3.0)
    bench.feed(moves.Placed(refusal))
    assert bench.end.refusal == refusal
    assert bench.closings() == []


def test_a_lost_ask_is_repeated_with_the_same_attempt(bench: Bench) -> None:
    bench.feed(moves.AskLost(0))
    wake = bench.all(moves.Wake)[-1]
    assert isinstance(wake, moves.Wake) and wake.at is not None
    bench.now = wake.at
    bench.feed(moves.Ticked())
    asks = [a.ask for a in bench.seen if isinstance(a, moves.Place)]
    assert [ask.attempt for ask in asks] == [0, 0]
    assert asks[1].age == bench.now


def test_an_alarm_that_comes_a_little_early_is_set_again(bench: Bench) -> None:
    bench.feed(moves.AskLost(0))
    wake = bench.all(moves.Wake)[-1]
    assert isinstance(wake, moves.Wake) and wake.at is not None
    bench.now = wake.at - 0.0005
    assert bench.feed(moves.Ticked()) == [wake], "else nothing would ever wake it"


def test_a_dead_group_costs_a_pause_and_no_token(bench: Bench) -> None:
    first = bench.run()
    bench.arrive(0, 10, 11, cached=1)
    bench.feed(moves.GroupLost("a", 1, gone=True))
    ask = bench.all(moves.Place)[-1]
    assert isinstance(ask, moves.Place)
    assert (ask.ask.attempt, ask.ask.prompt_tokens, ask.ask.max_tokens) == (1, 5, 2)
    assert ask.ask.replay and ask.ask.avoid == (("a", 1),)
    bench.feed(moves.Placed(Refusal("r", 1, "no_group", "none is up", 1.0)))
    bench.now += 1.0
    bench.feed(moves.Ticked())
    second = bench.run(epoch=2)
    bench.arrive(2, 12, 13, finish=Finish.LENGTH, cached=5, epoch=2)
    assert bench.end.event == TokenEvent("r", 1, 2, (12, 13), Finish.LENGTH, 1), "the client's own cached count"
    assert bench.closings() == [first.id, second.id]
    assert bench.machine.output == [10, 11, 12, 13]


def test_late_events_of_an_old_attempt_and_of_an_old_epoch_are_dropped(bench: Bench) -> None:
    bench.run()
    bench.arrive(0, 10)
    bench.feed(moves.GroupLost("a", 1, gone=True))
    bench.run(epoch=3)
    assert bench.arrive(1, 99, attempt=0) == []
    bench.arrive(1, 11, epoch=3)
    assert bench.arrive(2, 99, epoch=2) == []
    assert bench.machine.output == [10, 11]


def test_the_loss_of_another_group_or_an_older_incarnation_is_ignored(bench: Bench) -> None:
    bench.run(epoch=2)
    assert bench.feed(moves.GroupLost("b", 5, gone=True)) == []
    assert bench.feed(moves.GroupLost("a", 1, gone=True)) == []
    assert bench.machine.phase is Phase.RUNNING


def test_the_third_death_ends_it_with_one_error() -> None:
    bench = Bench(endurance=Endurance(deaths=2))
    bench.feed(moves.Started())
    for epoch in (1, 2, 3):
        bench.run(epoch)
        bench.arrive(0, 10, epoch=epoch) if epoch == 1 else None
        bench.feed(moves.GroupLost("a", epoch, gone=True))
        wake = bench.all(moves.Wake)[-1]
        assert isinstance(wake, moves.Wake)
    event = bench.end.event
    assert event is not None and event.finish is Finish.ERROR and "3 groups died" in (event.error or "")
    assert len(bench.closings()) == 3


def test_deaths_of_groups_that_never_ran_it_are_not_held_against_it() -> None:
    bench = Bench(endurance=Endurance(deaths=0))
    bench.feed(moves.Started())
    bench.place(group="a")
    bench.feed(moves.GroupLost("a", 1, gone=True))
    assert bench.machine.history.deaths == 0 and bench.machine.phase is Phase.ASKING


def test_nothing_is_asked_for_when_the_client_has_all_its_tokens() -> None:
    for tokens, stop, finish in (((1, 2, 3, 4), (), Finish.LENGTH), ((1, 9), (9,), Finish.STOP)):
        bench = Bench(most=4, stop=frozenset(stop))
        bench.feed(moves.Started())
        bench.run()
        bench.arrive(0, *tokens)
        bench.feed(moves.GroupLost("a", 1, gone=True))
        event = bench.end.event
        assert event is not None and event.finish is finish and event.tokens == ()


@pytest.mark.parametrize("code", ["grant_void", "draining", "group_dead", "no_lease"])
def test_a_rejection_that_another_place_may_not_share_is_asked_again(bench: Bench, code: str) -> None:
    grant = bench.place()
    bench.feed(moves.Rejected(0, code, "no"))
    assert bench.closings() == [grant.id] and bench.all(moves.Withdraw)
    ask = bench.all(moves.Place)[-1]
    assert isinstance(ask, moves.Place) and ask.ask.attempt == 1
    assert bool(ask.ask.avoid) == (code in ("draining", "group_dead"))


def test_a_rejection_for_good_ends_it(bench: Bench) -> None:
    bench.place()
    bench.feed(moves.Rejected(0, "never_fits", "10 tokens too many"))
    assert bench.end.refusal is not None and bench.end.refusal.code == "never_fits"


def test_a_duplicate_is_an_acceptance(bench: Bench) -> None:
    bench.place()
    bench.feed(moves.Rejected(0, "duplicate", "had it"))
    assert bench.machine.phase is Phase.RUNNING and bench.closings() == []


def test_attempts_that_come_to_nothing_are_bounded() -> None:
    bench = Bench(endurance=Endurance(misses=3))
    bench.feed(moves.Started())
    for _ in range(4):
        bench.now += 1.0
        bench.feed(moves.Ticked())
        bench.place()
        bench.feed(moves.SubmitLost(bench.machine.history.attempt))
    assert bench.end.refusal is not None and bench.end.refusal.code == FAILED
    assert len(bench.closings()) == 4


def test_a_group_that_ends_it_unasked_makes_it_try_elsewhere(bench: Bench) -> None:
    bench.run()
    bench.arrive(0, 10)
    bench.arrive(1, 11, finish=Finish.ABORT)
    assert bench.machine.phase is Phase.ASKING and bench.machine.output == [10, 11]


def test_an_error_of_its_own_ends_it(bench: Bench) -> None:
    bench.run()
    bench.arrive(0, finish=Finish.ERROR, error="bad grammar")
    event = bench.end.event
    assert event is not None and event.error == "bad grammar"
    assert len(bench.all(moves.Settle)) == 1


def test_patience_ends_a_wait_with_the_last_refusal_and_not_a_run() -> None:
    bench = Bench(endurance=Endurance(patience_s=10.0))
    bench.feed(moves.Started())
    bench.run()
    bench.now = 50.0
    bench.feed(moves.Ticked())
    assert bench.machine.phase is Phase.RUNNING
    bench.feed(moves.GroupLost("a", 1, gone=True))
    bench.feed(moves.Placed(Refusal("r", 1, "no_group", "none is up", 1.0)))
    bench.now = 59.9
    bench.feed(moves.Ticked())
    assert bench.machine.phase is Phase.ASKING
    bench.now = 60.0
    bench.feed(moves.Ticked())
    assert bench.end.refusal is not None and bench.end.refusal.code == "no_group"


def test_the_deadline_ends_it_whatever_it_does() -> None:
    bench = Bench(endurance=Endurance(timeout_s=10.0))
    bench.feed(moves.Started())
    assert moves.Wake(10.0) in bench.seen
    grant = bench.run()
    bench.arrive(0, 10)
    bench.now = 10.0
    bench.feed(moves.Ticked())
    event = bench.end.event
    assert event is not None and event.finish is Finish.ERROR
    assert bench.closings() == [grant.id] and bench.all(moves.Abort)
    assert bench.seen[-1] == moves.Wake(None), "no alarm outlives it"
    waiting = Bench(endurance=Endurance(timeout_s=1.0))
    waiting.feed(moves.Started())
    waiting.now = 1.0
    waiting.feed(moves.Ticked())
    assert waiting.end.refusal is not None and waiting.end.refusal.code == TIMED_OUT


def test_a_client_that_leaves_while_its_ask_is_on_the_way_gives_the_grant_back(bench: Bench) -> None:
    bench.feed(moves.Cancelled())
    assert bench.end == moves.End()
    grant = bench.grant()
    assert bench.feed(moves.Placed(grant)) == [moves.Withdraw(grant.id)]
    assert bench.feed(moves.Placed(grant)) == [], "once"


def test_a_client_that_leaves_while_it_is_submitted_has_it_aborted_again_when_it_is_in(bench: Bench) -> None:
    grant = bench.place()
    assert moves.Abort(grant) in bench.feed(moves.Cancelled())
    assert bench.closings() == [grant.id]
    assert bench.feed(moves.Submitted(0)) == [moves.Abort(grant)], "the abort may have overtaken the submit"
    assert bench.feed(moves.Submitted(0)) == []


def test_a_client_that_leaves_while_it_runs_or_rests(bench: Bench) -> None:
    grant = bench.run()
    bench.arrive(0, 10)
    actions = bench.feed(moves.Cancelled())
    assert moves.Abort(grant) in actions and bench.end == moves.End()
    assert bench.closings() == [grant.id]
    resting = Bench()
    resting.feed(moves.Started())
    resting.feed(moves.AskLost(0))
    resting.feed(moves.Cancelled())
    assert resting.end == moves.End()


@pytest.mark.parametrize("event, satisfied", [(moves.Satisfied(), True), (moves.Cancelled(), False)])
def test_a_client_with_all_it_wanted_is_told_apart_from_one_that_left(
    bench: Bench, event: moves.Event, satisfied: bool
) -> None:
    grant = bench.run()
    bench.arrive(0, 10, 11)
    actions = bench.feed(event)
    assert moves.Abort(grant) in actions and bench.end == moves.End()
    (settle,) = (action for action in actions if isinstance(action, moves.Settle))
    assert (settle.outcome.output_tokens, settle.outcome.satisfied) == (2, satisfied)


def test_nothing_but_giving_back_happens_after_the_end(bench: Bench) -> None:
    bench.run()
    bench.arrive(0, 1, 2, 3, 4, finish=Finish.LENGTH)
    for event in (
        moves.Started(),
        moves.Cancelled(),
        moves.Ticked(),
        moves.AskLost(0),
        moves.Submitted(0),
        moves.SubmitLost(0),
        moves.Rejected(0, "grant_void", "late"),
        moves.GroupLost("a", 1, gone=True),
        moves.Placed(Refusal("r", 0, "no_group", "late", 1.0)),
        moves.Arrived(1, TokenEvent("r", 0, 4, (5,))),
    ):
        assert bench.feed(event) == [], event
