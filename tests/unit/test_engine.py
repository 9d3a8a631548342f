"""The engine's edges: leases, grants, drain, death, reports."""

from __future__ import annotations

import pytest

from kvstore.store import KVStore
from tests.shadow import ShadowGroup
from workers import errors
from workers.engine import Engine
from workers.errors import EngineRefused
from workers.plan import Finish, GroupDead, GroupReport, Limits, StepPlan, StepResult
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling


def make(group: ShadowGroup | None = None, **options: float) -> Engine:
    store = KVStore(32, 4, ttl=20.0)
    scheduler = Scheduler(store, Limits(8, 64, 64), max_model_len=100)
    return Engine(scheduler, group or ShadowGroup(32, 4), name="g", epoch=3, **options)  # type: ignore[arg-type]


def request(name: str = "r", output: int = 5, **fields: object) -> Request:
    return Request(name, (1, 2, 3), Sampling(output), b"n", **fields)  # type: ignore[arg-type]


def refused(engine: Engine, *args: object) -> str:
    with pytest.raises(EngineRefused) as caught:
        engine.submit(*args)  # type: ignore[arg-type]
    return caught.value.code


def report(engine: Engine, now: float, **options: bool) -> GroupReport:
    answer = engine.report(**options)
    engine.turn(now)
    return answer.result(timeout=0)


def test_a_request_needs_a_subscriber() -> None:
    assert refused(make(), "nobody", request()) == errors.CODE_NO_LEASE


def test_a_grant_is_good_once_and_never_after_it_was_voided() -> None:
    engine = make()
    engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(grant="g1"))
    assert refused(engine, "i", request("other", grant="g1")) == errors.CODE_DUPLICATE
    assert refused(engine, "i", request(grant="g2")) == errors.CODE_DUPLICATE
    engine.obey(None, ["g1", "g9"])
    assert refused(engine, "i", request("third", grant="g9")) == errors.CODE_VOID
    first = report(engine, 0.0)
    assert first.accepted == ("g1",) and first.voided == ("g9",), "a grant in use is not acknowledged as void"
    assert first.live == ("g1",) and report(engine, 0.0).accepted == ()
    while not engine.idle:
        engine.turn(0.0)
    engine.obey(None, ["g1"])
    last = report(engine, 0.0)
    assert last.live == () and last.voided == ("g1",)


def test_a_lapsed_lease_ends_the_requests_of_that_ingress_only() -> None:
    engine = make(lease_s=5.0)
    box, other = engine.subscribe("i", lambda: None, 0.0), engine.subscribe("j", lambda: None, 0.0)
    engine.submit("i", request("a", 50))
    engine.submit("j", request("b", 50))
    for second in range(5):
        engine.turn(float(second))
        assert engine.renew("j", float(second))
    engine.turn(5.0)
    assert box.closed and not other.closed
    assert not engine.renew("i", 5.0) and refused(engine, "i", request("c")) == errors.CODE_NO_LEASE
    assert report(engine, 5.0).running == 1
    with pytest.raises(EngineRefused):
        engine.resubscribe("i", 0, lambda: None, 5.0)


def test_a_stream_is_taken_up_behind_the_last_acknowledgement() -> None:
    engine = make()
    box = engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(output=6))
    tokens: list[int] = []
    for turn in range(3):
        engine.turn(0.0)
        message = box.read()
        assert message is not None
        if turn == 0:
            tokens += message.events[0].tokens
            engine.ack("i", message.number)
    again = engine.resubscribe("i", 1, lambda: None, 0.0)
    message = again.read()
    assert message is not None and message.events[0].index == 1 and len(message.events[0].tokens) == 2


def test_drain_refuses_new_requests_and_lets_the_old_ones_end() -> None:
    engine = make()
    box = engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request())
    engine.drain()
    assert refused(engine, "i", request("late")) == errors.CODE_DRAINING
    while not engine.idle:
        engine.turn(0.0)
    message = box.read()
    assert message is not None and message.events[-1].finish is Finish.LENGTH


class Dying(ShadowGroup):
    def wait(self, handle: object) -> StepResult:
        raise GroupDead("rank 1 is gone")


def test_a_dead_group_closes_every_stream_and_takes_nothing() -> None:
    engine = make(Dying(32, 4))
    box = engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request())
    with pytest.raises(GroupDead):
        engine.turn(0.0)
    assert box.closed and isinstance(engine.dead, GroupDead)
    assert refused(engine, "i", request("next")) == errors.CODE_DEAD


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    engine = make()
    engine.subscribe("i", lambda: None, 0.0)
    assert refused(engine, "i", request(output=200)) == errors.CODE_NEVER_FITS


def test_reports_tell_blocks_commitments_and_sessions() -> None:
    engine = make()
    engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(output=9, granted_blocks=2, grant="g"))
    engine.turn(0.0)
    busy = report(engine, 0.0)
    assert (busy.committed, busy.running, busy.pool.held) == (2, 1, 1), "what it was granted"
    for _ in range(4):
        engine.turn(0.0)
    assert report(engine, 0.0).committed == 3, "it has outgrown that and is expected to use all that it may"
    while not engine.idle:
        engine.turn(1.0)
    idle = report(engine, 1.0)
    assert (idle.committed, idle.running, idle.pool.held) == (0, 0, 0)
    assert idle.pool.idle == 2 and idle.output_tokens == 9
    assert idle.sessions == ((b"n", 2, 20.0),)
    assert report(engine, 2.0).sessions == ()
    assert report(engine, 2.0, full=True).sessions == ((b"n", 2, 19.0),)
    engine.turn(21.0)
    assert report(engine, 21.0).sessions == ((b"n", 0, 0.0),)


def test_an_idle_engine_says_how_long_it_may_sleep() -> None:
    engine = make(lease_s=5.0)
    assert engine.patience(0.0) is None
    engine.subscribe("i", lambda: None, 0.0)
    assert engine.patience(1.0) == pytest.approx(4.0)
    engine.submit("i", request())
    while not engine.idle:
        engine.turn(1.0)
    engine.renew("i", 100.0)
    assert engine.patience(2.0) == pytest.approx(19.0), "then the cached blocks expire"


def test_aborts_leave_exactly_one_end_and_no_blocks() -> None:
    engine = make()
    box = engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(output=50))
    engine.turn(0.0)
    engine.abort("r", 0)
    engine.abort("r", 0)
    engine.turn(0.0)
    ends = [e.finish for m in iter(box.read, None) for e in m.events if e.finish]
    assert ends == [Finish.ABORT]
    assert report(engine, 0.0).pool.held == 0 and engine.idle


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_advances_by_one_token_every_step_at_any_depth(depth: int) -> None:
    engine = make(depth=depth)
    engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(output=20))
    turns = 0
    while not engine.idle:
        engine.turn(0.0)
        turns += 1
    assert turns <= 20 + depth


class Watched(ShadowGroup):
    """Notes, for every launch, whether the steps in flight before it computed a part of a prompt."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.behind: list[list[bool]] = []
        self._flying: list[bool] = []

    def launch(self, plan: StepPlan) -> object:
        self.behind.append(list(self._flying))
        self._flying.append(any(len(row.tokens) > 1 for row in plan.rows))
        return super().launch(plan)

    def wait(self, handle: object) -> StepResult:
        self._flying.pop(0)
        return super().wait(handle)


def test_nothing_is_launched_behind_a_part_of_a_prompt() -> None:
    """Whoever came meanwhile would wait for both steps."""
    group = Watched()
    engine = make(group, depth=2)
    engine.subscribe("i", lambda: None, 0.0)
    for index in range(4):
        engine.submit("i", request(f"r{index}", output=9))
        for _ in range(4):
            engine.turn(0.0)
    while not engine.idle:
        engine.turn(0.0)
    assert [True] not in group.behind and [False] in group.behind and max(map(len, group.behind)) == 1


def test_a_request_whose_ingress_lapses_before_it_starts_never_runs() -> None:
    engine = make(lease_s=5.0)
    engine.subscribe("i", lambda: None, 0.0)
    engine.submit("i", request(output=50, grant="g"))
    engine._lapse(5.0)  # between the submit and the step thread's next look into its inbox
    engine.turn(5.0)
    assert engine.idle
    last = report(engine, 5.0)
    assert (last.running, last.live, last.finished) == (0, (), 0)
