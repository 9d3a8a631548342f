"""The coordinator from outside: status, sessions, names of models, what a report is answered with."""

from __future__ import annotations

import json

import pytest

from cluster.coordination.cards import SessionCopy, Standing
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Refusal
from tests.coordination import ask, card, placed, queued, refused, report, running, terms


@pytest.fixture
def coordinator() -> Coordinator:
    made = Coordinator(terms())
    made.join(card(), 0.0)
    return made


def test_status_is_plain_json(coordinator: Coordinator) -> None:
    placed(coordinator, ask(), 0.0)
    coordinator.report(report(), 1.0)
    status = json.loads(json.dumps(coordinator.status(1.0)))
    assert status["grants"] == {"issued": 1, "accepted": 0, "void": 0, "given": 1}
    assert status["groups"][0]["state"] == "up" and status["groups"][0]["pool"]["total"] == 10
    row = status["groups"][0]
    assert (row["level"], row["drives"], row["changes"]) == ("normal", {"held": 0.0, "growth": 0.0}, 0)
    assert row["preemptions"] == 0 and row["request_blocks"] == []
    assert status["line"]["m"]["classes"]["interactive"]["waiting"] == 0


def test_status_shows_the_line_the_refusals_and_the_counters_of_ended_incarnations(coordinator: Coordinator) -> None:
    coordinator.report(report(preemptions=3, ooms=1, output_tokens=40), 0.0)
    coordinator.join(card(), 1.0)
    coordinator.report(report(epoch=2, preemptions=2, output_tokens=2), 1.0)
    for number in range(7):
        coordinator.place("i", [ask(str(number))], 1 + number / 2)
    refused(coordinator, ask("x", prompt=1000), 4.0)
    status = json.loads(json.dumps(coordinator.status(4.5)))
    assert status["refused"] == {"never_fits": 1}
    assert status["counters"]["preemptions"] == 5 and status["counters"]["output_tokens"] == 42
    line = status["line"]["m"]
    assert line["requests"] == 2 and line["tenants_waiting"] == {"default": 2, "other": 0}
    facts = line["classes"]["interactive"]
    assert (facts["waiting"], facts["tokens"], facts["oldest_s"]) == (2, 64, 1.0)
    assert status["models"]["m"]["waiting"] == 2


def test_those_whom_a_rebuilt_smaller_group_can_never_run_are_told(coordinator: Coordinator) -> None:
    for number in range(5):
        placed(coordinator, ask(str(number)))
    queued(coordinator, ask("5"))
    coordinator.join(card(blocks=1), 1.0)
    (told,) = coordinator.news("i", 0, 1.0).answers
    assert isinstance(told, Refusal) and told.code == "no_group"


def test_a_name_beyond_the_first_shares_the_line_of_its_model(coordinator: Coordinator) -> None:
    coordinator.join(card(models=("m", "alias")), 0.0)
    for number in range(5):
        placed(coordinator, ask(str(number), model=("m", "alias")[number % 2]))
    assert queued(coordinator, ask("5", model="alias")).ahead == 0
    assert queued(coordinator, ask("6", model="m")).ahead == 1
    assert list(coordinator.status(0.0)["line"]) == ["m"]  # type: ignore[call-overload]


def test_a_name_that_only_some_groups_of_a_model_serve_reaches_just_those(coordinator: Coordinator) -> None:
    coordinator.join(card("b", models=("m", "only-b")), 0.0)
    for number in range(5):
        assert placed(coordinator, ask(str(number), model="only-b")).group == "b"
    queued(coordinator, ask("5", model="only-b"))
    assert placed(coordinator, ask("6", model="m")).group == "a"


def test_what_is_known_of_a_session_is_told_by_group_until_it_expires(coordinator: Coordinator) -> None:
    coordinator.join(card("b"), 0.0)
    coordinator.report(report(sessions=((b"x", 4, 10.0),)), 0.0)
    coordinator.report(report(group="b", sessions=((b"x", 1, 20.0), (b"y", 2, 5.0))), 0.0)
    assert coordinator.session((b"x",), 4.0) == (SessionCopy("a", 4, 64, 6.0), SessionCopy("b", 1, 16, 16.0))
    assert coordinator.session((b"x", b"y"), 12.0) == (SessionCopy("b", 1, 16, 8.0),)
    assert coordinator.session((b"z",), 0.0) == ()


@pytest.mark.parametrize(("groups", "beat"), [(1, 0.5), (100, 0.5), (400, 2.0), (1200, 5.0)])
def test_with_more_groups_each_reports_less_often_and_is_waited_for_longer(groups: int, beat: float) -> None:
    coordinator = Coordinator(terms())
    for number in range(groups):
        coordinator.join(card(str(number)), 0.0)
    assert coordinator.report(report(group="0"), 0.0).beat_s == beat
    later = 2.9 * beat if beat > 2 else 4.9
    grant = placed(coordinator, ask(), later)
    assert {state.standing for state in coordinator.groups(later)} == {Standing.UP}
    if beat > 2.5:
        assert coordinator.report(running([grant], 2, group=grant.group), later + beat).void == (), "seen in time"


def test_the_reply_to_a_report_carries_the_limits_of_the_groups_level(coordinator: Coordinator) -> None:
    limits = coordinator.report(report(), 0.0).limits
    assert limits is not None and (limits.max_num_seqs, limits.max_num_batched_tokens, limits.chunk) == (4, 64, 64)
    assert limits.refill and not limits.trim
    limits = coordinator.report(report(sequence=2, held=9), 1.0).limits
    assert limits is not None and limits.refill and limits.trim, "a full pool that fits costs no throughput"
    limits = coordinator.report(report(sequence=3, held=9, committed=11, running=2), 4.0).limits
    assert limits is not None and (limits.refill, limits.trim, limits.chunk) == (False, True, 32)
