"""What an engine reports, and what that costs."""

from __future__ import annotations

import time

import pytest

from kvstore.store import KVStore
from tests.engine_bench import make, report, request, run
from tests.shadow import ShadowGroup
from workers.engine import Engine
from workers.plan import Limits, StepPlan, StepResult
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling


def test_a_report_says_what_memory_ran_out_expired_was_evicted_and_lies_unused() -> None:
    short = ShadowGroup(32, 4, short=lambda plan: plan.step == 2)
    engine, _ = make(group=short)
    engine.submit("i", request("r", 9, 3, grant="g"))
    engine.submit("i", request("s", 10, 3, namespace=b"m", grant="h"))
    engine.turn(0.0)
    engine.turn(0.0)
    first = report(engine)
    assert (first.running, first.ooms, first.committed) == (2, 1, 3 + 4)
    run(engine)
    done = report(engine)
    assert sum(done.request_blocks) == 2 and done.unused_slots == 0
    assert sum(row.steps for row in done.steps) >= 3 and sum(row.sampled for row in done.steps) == 6
    assert sum(row.computed for row in done.steps) == done.computed_tokens == 9 + 10 + 2 * 2
    engine.turn(20.0)
    expired = report(engine, 20.0)
    assert expired.expired == 2 + 3, "11 and 12 tokens were computed"
    engine.submit("i", request("again", 9, 1, grant="i"))
    run(engine, 20.0)
    assert report(engine, 20.0).expired_asked == 8


def test_slots_of_held_blocks_without_a_token_are_counted() -> None:
    engine, _ = make()
    engine.submit("i", request("r", 5, 6, grant="g"))
    engine.turn(0.0)
    assert report(engine).unused_slots == 3, "five tokens in two blocks of four"


class Slow(ShadowGroup):
    def wait(self, handle: object) -> StepResult:
        result = super().wait(handle)
        return StepResult(result.step, result.tokens, seconds=0.25 if result.step == 2 else 0.01)


def test_the_longest_step_is_that_since_the_report_before() -> None:
    engine, _ = make(group=Slow(32, 4))
    engine.submit("i", request("r", 5, 8, grant="g"))
    for _ in range(3):
        engine.turn(0.0)
    assert report(engine).latest == 0.25
    engine.turn(0.0)
    assert report(engine).latest == 0.01
    run(engine)
    report(engine)
    assert report(engine).latest == 0.0
    assert sum(row.seconds for row in report(engine).steps) == pytest.approx(0.25 + 7 * 0.01)


class Ranks:
    """They sample something at once."""

    def launch(self, plan: StepPlan) -> object:
        return StepResult(plan.step, tuple(7 for row in plan.rows if row.draw is not None), 0.01)

    def wait(self, handle: object) -> StepResult:
        assert isinstance(handle, StepResult)
        return handle


@pytest.mark.parametrize("shared", [False, True])
def test_a_report_with_many_live_sequences_is_cheap(shared: bool) -> None:
    scheduler = Scheduler(KVStore(8192, 32), Limits(256, 4096, 4096), max_model_len=10_000)
    engine = Engine(scheduler, Ranks(), name="g", epoch=1, lease_s=1e9)
    engine.subscribe("i", lambda: None, 0.0)
    for index in range(256):
        head = range(600) if shared else range(1000 * index, 1000 * index + 600)
        asked = Request(f"r{index}", tuple(head), Sampling(1000), b"n", grant=str(index), granted_blocks=30)
        engine.submit("i", asked)
    engine.turn(0.0)
    while len(scheduler.waiting) or any(s.todo > 1 for s in scheduler.running):
        engine.turn(0.0)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        engine._make_report(0.0, False)
        times.append(time.perf_counter() - began)
    assert len(scheduler.running) == 256
    assert min(times) < 0.003, "the aim is a millisecond"


def test_the_audit_covers_the_whole_pool_in_time_and_repairs_it() -> None:
    engine, _ = make(depth=2)
    pool = engine._scheduler.store.pool
    engine.submit("i", request("r", 8, 60, grant="g"))
    engine.turn(1000.0)
    block = next(b for b in range(pool.total) if pool.refs[b])
    pool.refs[block] = 2
    pool.shared += 1
    now = 1000.0
    while now < 1060.0 and not engine._scheduler.store.leaked:
        now += 1.3
        engine.turn(now)
    assert engine._scheduler.store.leaked == 1 and report(engine, now).leaked == 1
    engine._scheduler.store.check()
