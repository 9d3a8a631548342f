"""What the coordinator and its absence mean to an engine: limits, purges, requests without a grant, deadlines."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.engine_bench import OWN, cached, make, refused, report, request, run
from tests.shadow import ShadowGroup
from workers import errors
from workers.orders import OBEY_S
from workers.plan import Finish, GroupDead, GroupReport, Limits, StepResult

# -- limits -----------------------------------------------------------------------------------------------------------


def test_limits_hold_for_ten_seconds_after_they_were_last_said() -> None:
    engine, _ = make()
    lower = Limits(2, 16, 8, refill=False, trim=True)
    engine.obey(lower, ())
    engine.turn(100.0)
    assert engine._scheduler.limits == lower
    engine.obey(lower, ())
    engine.turn(105.0)
    engine.obey(None, ())
    engine.turn(105.0 + OBEY_S - 0.1)
    assert engine._scheduler.limits == lower, "a reply without limits says nothing about them"
    engine.turn(105.0 + OBEY_S)
    assert engine._scheduler.limits == OWN


def test_limits_never_exceed_the_groups_own_and_never_stop_it() -> None:
    engine, _ = make()
    engine.obey(Limits(1000, 100_000, 100_000), ())
    engine.turn(1.0)
    assert engine._scheduler.limits == OWN
    engine.obey(Limits(0, 0, 0), ())
    engine.submit("i", request("r"))
    run(engine, 2.0)


# -- without a grant --------------------------------------------------------------------------------------------------


def test_without_a_grant_a_request_needs_room_by_the_forecast() -> None:
    engine, _ = make(blocks=16)
    assert refused(engine, request("a", 8, 24, granted_blocks=8)) is None
    assert refused(engine, request("b", 8, 24, granted_blocks=8)) is None, "both on the way: 16 blocks"
    assert refused(engine, request("c", 4, 4, granted_blocks=2)) == errors.CODE_FULL
    engine.turn(0.0)
    assert refused(engine, request("c", 4, 4, granted_blocks=2)) == errors.CODE_FULL, "running they need as much"
    assert refused(engine, request("d", 4, 4, granted_blocks=2, grant="g")) is None, "a grant is a promise"
    run(engine)
    assert refused(engine, request("e", 8, 24)) is None, "nothing else is here"


def test_without_a_grant_a_request_needs_a_free_slot() -> None:
    engine, _ = make(blocks=64)
    for index in range(OWN.max_num_seqs):
        assert refused(engine, request(f"r{index}", 1, 2)) is None
    assert refused(engine, request("more", 1, 2)) == errors.CODE_FULL
    run(engine)
    assert refused(engine, request("more", 1, 2)) is None


@pytest.mark.parametrize("grant", ["", "g"])
def test_a_submit_that_comes_twice_runs_once_even_when_the_first_has_ended(grant: str) -> None:
    engine, _ = make()
    assert refused(engine, request("r", grant=grant)) is None
    assert refused(engine, request("r", grant=grant)) == errors.CODE_DUPLICATE
    run(engine)
    assert refused(engine, request("r", grant=grant)) == errors.CODE_DUPLICATE
    assert refused(engine, request("r", attempt=1)) is None, "another attempt is another matter"


def test_a_lone_request_may_have_the_whole_group() -> None:
    engine, _ = make(blocks=4)
    assert refused(engine, request("all", 8, 8)) is None
    assert refused(engine, request("never", 8, 9)) == errors.CODE_NEVER_FITS


def test_a_refusal_brings_a_new_forecast() -> None:
    engine, _ = make(blocks=16)
    engine.submit("i", request("long", 4, 24, namespace=b"x"))
    engine.submit("i", request("short", 8, 28, namespace=b"y"))
    engine.turn(0.0)
    report(engine)
    engine.abort("short", 0)
    engine.turn(0.0)
    assert refused(engine, request("next", 8, 20)) == errors.CODE_FULL, "the last forecast is all it knows"
    assert engine.work.is_set()
    engine.turn(0.0)
    assert refused(engine, request("next", 8, 20)) is None


# -- purges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_purge_is_answered_when_nothing_can_be_found_any_more(depth: int, turns: int) -> None:
    engine, box = make(depth=depth)
    engine.submit("i", request("before", 17, 1, grant="1"))
    run(engine)
    engine.submit("i", request("during", 13, 6, grant="2"))
    for _ in range(turns):
        engine.turn(0.0)
    answer = engine.purge(b"n")
    assert not answer.done()
    engine.turn(0.0)
    assert answer.result(timeout=0) >= 4
    engine._scheduler.store.check()
    run(engine)
    engine.turn(0.0)
    assert not engine._scheduler.store.sessions.blocks(b"n"), "what began before the purge leaves nothing"
    engine.submit("i", request("after", 17, 1, grant="3"))
    run(engine)
    engine.submit("i", request("again", 17, 1, grant="4"))
    run(engine)
    ends = cached(box)
    assert (ends["after"], ends["again"]) == (0, 16), "the pair: a new session is cached as ever"


def test_every_block_of_a_purged_session_is_zeroed() -> None:
    group = ShadowGroup(32, 4)
    engine, _ = make(group=group)
    engine.submit("i", request("r", 13, 4, grant="1"))
    for _ in range(3):
        engine.turn(0.0)
    written = {block for block, slots in enumerate(group.slots) if any(slot is not None for slot in slots)}
    answer = engine.purge(b"n")
    run(engine)
    for _ in range(3):
        engine.turn(0.0)
    assert answer.result(timeout=0) == 3 and written
    assert all(slot is None for slots in group.slots for slot in slots)


def test_a_purge_of_what_is_not_there_is_answered_too() -> None:
    engine, _ = make()
    answer = engine.purge(b"nobody")
    engine.turn(0.0)
    assert answer.result(timeout=0) == 0


class Dying(ShadowGroup):
    def wait(self, handle: object) -> StepResult:
        raise GroupDead("rank 1 is gone")


def test_questions_to_a_dead_group_are_answered_with_its_death() -> None:
    engine, _ = make(group=Dying(32, 4))
    engine.submit("i", request("r"))
    with pytest.raises(GroupDead):
        engine.turn(0.0)
    before: list[Future[int] | Future[GroupReport]] = [engine.report(), engine.purge(b"n")]
    for answer in before:
        assert isinstance(answer.exception(timeout=0), GroupDead)
    assert engine.recorder.dump()[-1]["kind"] == "dead"


def test_a_question_that_nobody_waits_for_any_more_harms_nobody() -> None:
    engine, _ = make()
    assert engine.report().cancel()
    engine.turn(0.0)
    assert report(engine).sequence == 1


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_waiting_deadline_wakes_the_engine() -> None:
    engine, box = make(blocks=8)
    engine.submit("i", request("first", 24, 8, grant="1"))
    engine.turn(0.0)
    engine.submit("i", request("late", 20, 1, b"m", grant="2", left=3.0))
    engine.turn(0.0)
    assert engine.patience(1.0) == pytest.approx(2.0)
    engine.turn(3.0)
    events = [e for m in iter(box.read, None) for e in m.events if e.request == "late"]
    assert [(e.finish, e.tokens) for e in events] == [(Finish.ERROR, ())]
    assert events[0].error is not None and "deadline" in events[0].error
    run(engine, 3.0)
