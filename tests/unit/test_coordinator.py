"""The coordinator: registry, epochs, grants; pure, so every case is a few calls with a `now`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.coordination.cards import Standing
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant
from tests.coordination import ask, card, committed, outcome, placed, refused, report, running, terms
from workers.plan import Finish


@pytest.fixture
def coordinator() -> Coordinator:
    made = Coordinator(terms())
    made.join(card(), 0.0)
    return made


@pytest.mark.parametrize("satisfied", [True, False])
def test_an_aborted_output_teaches_only_when_the_client_had_all_it_wanted(
    coordinator: Coordinator, satisfied: bool
) -> None:
    for number in range(40):
        grant = placed(coordinator, ask(str(number), most=64), float(number))
        end = replace(outcome(grant, Finish.ABORT, output=4), satisfied=satisfied)
        coordinator.settle([end, end], float(number))
        coordinator.report(report(epoch=grant.epoch, sequence=number + 1, voided=(grant.id,)), float(number))
    assert (placed(coordinator, ask("last", most=64), 39.5).blocks < 5) is satisfied


def test_a_grant_reserves_prompt_and_expected_output_and_settling_gives_it_back(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask())
    assert (grant.group, grant.epoch, grant.address, grant.blocks) == ("a", 1, "at-a", 2)
    assert committed(coordinator) == 2
    coordinator.settle([outcome(grant)], 1.0)
    assert committed(coordinator) == 0


def test_the_same_ask_gets_the_same_grant_again_with_the_time_that_is_left(coordinator: Coordinator) -> None:
    first = placed(coordinator, ask(), 0.0)
    again = placed(coordinator, ask(), 2.0)
    assert again.id == first.id
    assert again.expires_s == first.expires_s - 2.0
    assert committed(coordinator) == 2


def test_a_late_copy_of_an_ask_is_not_granted_again_after_its_end(coordinator: Coordinator) -> None:
    coordinator.settle([outcome(placed(coordinator, ask()))], 1.0)
    assert refused(coordinator, ask(), 2.0).code == "stale_attempt"
    assert refused(coordinator, ask(), 2.0).retry_after is None


def test_a_newer_attempt_makes_the_older_grant_void(coordinator: Coordinator) -> None:
    first = placed(coordinator, ask())
    second = placed(coordinator, ask(attempt=1))
    assert second.id != first.id
    assert coordinator.report(report(), 1.0).void == (first.id,)
    assert refused(coordinator, ask(attempt=0), 1.0).code == "stale_attempt"


def test_a_batch_is_answered_in_order_and_goes_to_the_least_committed_group() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card("a"), 0.0)
    coordinator.join(card("b", blocks=20, max_num_seqs=8), 0.0)
    answers = coordinator.place("i", [ask(str(n)) for n in range(6)], 0.0)
    assert [answer.request for answer in answers] == [str(n) for n in range(6)]
    groups = [answer.group for answer in answers if isinstance(answer, Grant)]
    assert groups.count("b") == 4 and groups.count("a") == 2, groups


def test_a_grant_that_nobody_takes_is_void_until_the_group_acknowledges(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    assert coordinator.report(report(sequence=1), 4.0).void == ()
    assert coordinator.report(report(sequence=2), 5.0).void == (grant.id,)
    assert coordinator.report(report(sequence=3), 6.0).void == (grant.id,), "named until it is acknowledged"
    assert committed(coordinator, 6.0) == 2, "only the acknowledgement gives the blocks back"
    assert refused(coordinator, ask(), 6.0).code == "stale_attempt"
    assert coordinator.report(report(sequence=4, voided=(grant.id,)), 7.0).void == ()
    assert committed(coordinator, 7.0) == 0


def test_an_accepted_grant_does_not_expire(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.report(report(accepted=(grant.id,), live=(grant.id,), committed=2, running=1), 1.0)
    assert coordinator.report(report(sequence=2, live=(grant.id,), committed=2, running=1), 30.0).void == ()
    assert committed(coordinator, 30.0) == 2


def test_an_expired_grant_that_turns_out_to_run_is_good_again(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    assert coordinator.report(report(), 6.0).void == (grant.id,)
    reply = coordinator.report(report(sequence=2, accepted=(grant.id,), live=(grant.id,), committed=2, running=1), 7.0)
    assert reply.void == ()
    coordinator.settle([outcome(grant)], 8.0)
    assert committed(coordinator, 8.0) == 0


def test_a_withdrawn_grant_stays_void_while_its_request_runs(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.withdraw([grant.id], 0.5)
    live = report(accepted=(grant.id,), live=(grant.id,), committed=2, running=1)
    assert coordinator.report(live, 1.0).void == (grant.id,)
    assert committed(coordinator, 1.0) == 2
    assert coordinator.report(report(sequence=2), 2.0).void == (), "it was seen to run and runs no more"
    assert committed(coordinator, 2.0) == 0


def test_an_aborted_grant_gives_its_blocks_back_when_the_group_says_so(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.settle([outcome(grant, Finish.ABORT)], 1.0)
    assert committed(coordinator, 1.0) == 2
    coordinator.report(report(accepted=(grant.id,)), 2.0)
    assert committed(coordinator, 2.0) == 0


def test_what_ended_without_its_ingress_is_found_by_the_report(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.report(report(accepted=(grant.id,), live=(grant.id,), committed=2, running=1), 1.0)
    coordinator.report(report(sequence=2), 2.0)
    assert committed(coordinator, 2.0) == 0


def test_growth_beyond_the_grant_and_unknown_requests_count_as_committed(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.report(report(accepted=(grant.id,), live=(grant.id, "older"), committed=7, running=2), 1.0)
    assert committed(coordinator, 1.0) == 7
    coordinator.settle([outcome(grant)], 1.5)
    coordinator.report(report(sequence=2), 2.0)
    assert committed(coordinator, 2.0) == 0


def test_blocks_that_sequences_share_count_once_and_do_not_vanish_with_the_first_to_end(
    coordinator: Coordinator,
) -> None:
    one, two = placed(coordinator, ask("1", prompt=64)), placed(coordinator, ask("2", prompt=64))
    assert committed(coordinator) == 10
    ids = (one.id, two.id)
    coordinator.report(report(accepted=ids, live=ids, committed=6, running=2), 1.0)
    assert committed(coordinator, 1.0) == 6
    coordinator.settle([outcome(one)], 1.5)
    assert committed(coordinator, 1.5) == 5, "the other still holds the shared four, and its own one"
    coordinator.settle([outcome(two)], 1.6)
    coordinator.report(report(sequence=2), 2.0)
    assert committed(coordinator, 2.0) == 0


def test_an_older_report_counts_for_nothing(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.report(report(sequence=5, accepted=(grant.id,), live=(grant.id,), committed=2, running=1), 1.0)
    coordinator.report(report(sequence=4), 1.1)
    assert committed(coordinator, 1.1) == 2


def test_what_can_never_fit_is_refused_with_the_numbers(coordinator: Coordinator) -> None:
    refusal = refused(coordinator, ask(prompt=100, most=100))
    assert (refusal.code, refusal.retry_after) == ("never_fits", None)
    for number in ("100", "200", "160", "10 blocks of 16"):
        assert number in refusal.message
    assert placed(coordinator, ask(prompt=100, most=60))


def test_a_larger_group_that_is_down_makes_it_no_group_rather_than_never(coordinator: Coordinator) -> None:
    coordinator.join(card("b", blocks=16), 0.0)
    coordinator.leave("b", 1, 0.0)
    refusal = refused(coordinator, ask(prompt=100, most=100))
    assert (refusal.code, refusal.retry_after) == ("no_group", 1.0)


def test_an_unknown_model_has_no_group(coordinator: Coordinator) -> None:
    assert refused(coordinator, ask(model="other")).code == "no_group"


def test_a_silent_group_gets_nothing_and_is_dropped_with_its_grants(coordinator: Coordinator) -> None:
    placed(coordinator, ask(), 0.0)
    assert coordinator.groups(6.0)[0].standing is Standing.LAPSED
    assert refused(coordinator, ask("2"), 6.0).code == "no_group"
    coordinator.report(report(committed=2, waiting=1), 7.0)
    assert placed(coordinator, ask("2"), 7.0)
    assert coordinator.groups(40.0) == ()
    assert coordinator.report(report(sequence=2), 41.0).known is False
    assert coordinator.join(card(), 41.0) == 2
    assert committed(coordinator, 41.0) == 0


def test_a_group_whose_steps_stand_still_while_it_has_work_gets_nothing(coordinator: Coordinator) -> None:
    for second in range(40):
        coordinator.report(report(sequence=second + 1, step=3, running=1, committed=1), float(second))
    assert coordinator.groups(39.0)[0].standing is Standing.STALLED
    assert refused(coordinator, ask(), 39.0).code == "no_group"
    coordinator.report(report(sequence=50, step=4, running=1, committed=1), 40.0)
    assert placed(coordinator, ask(), 40.0)


def test_a_rebuilt_group_gets_the_next_epoch_and_its_old_grants_end(coordinator: Coordinator) -> None:
    old = placed(coordinator, ask(), 0.0)
    assert coordinator.join(card(), 1.0) == 2
    assert committed(coordinator, 1.0) == 0
    coordinator.settle([outcome(old)], 1.1)
    late = coordinator.report(report(epoch=1, sequence=9), 1.2)
    assert (late.known, late.epoch) == (False, 2), "the old incarnation was replaced"
    new = placed(coordinator, ask(attempt=1), 2.0)
    assert new.epoch == 2 and new.id != old.id


def test_after_a_restart_epochs_continue_above_the_highest_reported() -> None:
    coordinator = Coordinator(terms())
    reply = coordinator.report(report(epoch=7), 0.0)
    assert (reply.known, reply.epoch) == (False, 0), "join again"
    assert coordinator.join(card(), 0.1) == 8
    assert coordinator.report(report(epoch=8), 0.2).known
    ahead = coordinator.report(report(epoch=12), 0.3)
    assert (ahead.known, ahead.epoch) == (False, 0)
    assert coordinator.join(card(), 0.4) == 13


def test_a_group_that_leaves_gets_nothing_but_keeps_what_it_runs(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask(), 0.0)
    coordinator.leave("a", 7, 0.0)
    assert placed(coordinator, ask("2"), 0.0), "another incarnation's farewell"
    coordinator.leave("a", 1, 0.0)
    assert refused(coordinator, ask("3"), 0.0).code == "no_group"
    reply = coordinator.report(report(accepted=(grant.id,), live=(grant.id,), committed=2, running=1), 1.0)
    assert reply.known and committed(coordinator, 1.0) == 4


def test_incarnations_that_a_request_saw_die_are_avoided_even_if_there_is_no_other(coordinator: Coordinator) -> None:
    shunning = ask(attempt=1, replay=True, avoid=(("a", 1),))
    assert refused(coordinator, shunning).code == "no_group"
    coordinator.join(card(), 1.0)
    assert placed(coordinator, shunning, 1.0).epoch == 2


def test_cached_blocks_of_several_layer_groups_are_the_same_tokens(coordinator: Coordinator) -> None:
    """Two groups, one of them with a window: each has its blocks of every token that is cached."""
    epoch = coordinator.join(card("w", windows=(None, 40)), 0.0)
    coordinator.report(report(epoch, group="w", sessions=((b"x", 6, 100.0),)), 0.0)
    coordinator.report(report(sessions=((b"x", 6, 100.0),)), 0.0)
    size = card().block_size
    assert {copy.group: copy.tokens for copy in coordinator.session((b"x",), 0.0)} == {"a": 6 * size, "w": 3 * size}


def test_cached_sessions_are_seen_until_they_expire(coordinator: Coordinator) -> None:
    coordinator.report(report(sessions=((b"x", 4, 10.0), (b"y", 2, 100.0))), 0.0)
    assert coordinator.groups(0.0)[0].sessions == 2
    coordinator.report(report(sequence=2), 11.0)
    assert coordinator.groups(11.0)[0].sessions == 1
    coordinator.report(report(sequence=3, sessions=((b"y", 0, 0.0),)), 12.0)
    assert coordinator.groups(12.0)[0].sessions == 0


def test_a_card_of_another_protocol_or_without_room_is_refused(coordinator: Coordinator) -> None:
    with pytest.raises(ValueError, match="protocol 0"):
        coordinator.join(card("b", protocol=0), 0.0)
    with pytest.raises(ValueError, match="no room"):
        coordinator.join(card("b", blocks=0), 0.0)


def test_a_late_or_repeated_report_moves_no_level_and_gives_nothing_twice(coordinator: Coordinator) -> None:
    grant = placed(coordinator, ask())
    coordinator.report(running([grant], 2), 1.0)
    for late in (running([grant], 2, committed=99), running([grant], 1, committed=99)):
        coordinator.report(late, 5.0)
    assert committed(coordinator, 5.0) == 2


def test_a_share_of_a_forecast_below_the_sum_of_grants_goes_with_each_that_ends(coordinator: Coordinator) -> None:
    grants = [placed(coordinator, ask(str(number), prompt=16)) for number in range(4)]
    coordinator.report(running(grants, committed=4), 1.0)
    coordinator.settle([outcome(grants[0])], 1.1)
    assert committed(coordinator, 1.1) == 3
    coordinator.settle([outcome(grant) for grant in grants[1:3]], 1.2)
    assert committed(coordinator, 1.2) == 2, "never less than what one of those left will hold"
    coordinator.settle([outcome(grants[3])], 1.3)
    assert committed(coordinator, 1.3) == 0


def test_grants_that_no_report_has_shown_come_on_top_of_the_forecast(coordinator: Coordinator) -> None:
    grants = [placed(coordinator, ask(str(number))) for number in range(2)]
    coordinator.report(running(grants, committed=3), 1.0)
    placed(coordinator, ask("2"), 1.1)
    assert committed(coordinator, 1.1) == 5


def test_prefilling_a_cache_needs_no_output_and_teaches_nothing(coordinator: Coordinator) -> None:
    for number in range(20):
        grant = placed(coordinator, ask(str(number), most=0))
        assert grant.blocks == 2
        coordinator.settle([outcome(grant, output=0)], 0.0)
    assert placed(coordinator, ask("last", most=100)).blocks == 8
