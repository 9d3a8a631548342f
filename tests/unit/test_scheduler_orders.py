"""What limits, deadlines and prewarms do to the scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduler_bench import Bench
from workers.plan import Finish
from workers.sequence import Priority, Request, Sampling


def limit(bench: Bench, **fields: bool | int) -> None:
    bench.scheduler.limits = replace(bench.scheduler.limits, **fields)  # type: ignore[arg-type]


def test_without_refill_a_slot_that_finishes_stays_empty() -> None:
    bench = Bench(seqs=2)
    bench.add("short", 4, output=2)
    bench.add("long", 4, output=12, base=50)
    bench.step()
    limit(bench, refill=False)
    bench.add("new", 4, base=100)
    while "long" not in bench.ended():
        bench.step()
        assert "new" not in bench.running()
    bench.step()
    assert bench.running() == ["new"], "alone it may run"


def test_without_refill_what_was_preempted_comes_back() -> None:
    bench = Bench(blocks=8)
    bench.add("batch", 7, output=12, priority=Priority.BATCH, base=50)
    bench.add("one", 7, output=12)
    bench.add("two", 7, output=12, base=100)
    bench.step()
    limit(bench, refill=False)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    for index in range(20):
        bench.add(f"new{index}", 3, base=200 + 10 * index)
    while "batch" not in bench.ended():
        assert bench.step() is not None
        assert not [name for name in bench.running() if name.startswith("new")]
    bench.finish()
    assert len(bench.ended()) == 23


def test_without_refill_nothing_is_preempted_for_a_new_request() -> None:
    bench = Bench(blocks=16, seqs=1)
    bench.add("batch", 30, output=8, priority=Priority.BATCH)
    bench.step()
    limit(bench, refill=False)
    bench.add("chat", 30, output=2, base=100)
    bench.step()
    assert bench.running() == ["batch"]
    bench.finish()
    assert bench.ended() == ["batch", "chat"]


def test_while_memory_is_scarce_a_step_zeroes_more() -> None:
    sizes = {}
    for trim in (False, True):
        bench = Bench(blocks=128, budget=600)
        limit(bench, trim=trim, chunk=600)
        bench.add("a", 500, output=1)
        bench.finish()
        bench.now += 1000.0
        plan = bench.step()
        assert plan is not None
        sizes[trim] = len(plan.zero)
    assert sizes == {False: 64, True: 125}


def test_limits_below_what_runs_stop_nobody() -> None:
    bench = Bench(seqs=4)
    for index in range(4):
        bench.add(f"r{index}", 4, output=6, base=10 * index)
    bench.step()
    limit(bench, max_num_seqs=1)
    plan = bench.step()
    assert plan is not None and len(plan.rows) == 4
    bench.finish()


@pytest.mark.parametrize("left", [-1.0, 0.0, 0.5])
def test_a_request_whose_deadline_passes_while_it_waits_is_never_prefilled(left: float) -> None:
    bench = Bench(blocks=8, budget=64)
    bench.add("first", 20, output=8)
    bench.step()
    bench.add("late", 20, output=2, base=100, left=left)
    if left > 0:
        assert bench.scheduler.end_late(bench.now) == []
        bench.step()
        assert bench.scheduler.waiting.next_deadline == pytest.approx(bench.now + left)
    bench.now += max(left, 0.0)
    (event,) = bench.scheduler.end_late(bench.now)
    assert (event.request, event.tokens, event.finish) == ("late", (), Finish.ERROR)
    assert event.error is not None and "deadline" in event.error
    assert bench.scheduler.end_late(bench.now) == [] and bench.scheduler.waiting.next_deadline is None
    bench.finish()
    assert bench.ended() == ["first"]
    assert bench.scheduler.counters.computed_tokens == 27


def test_a_deadline_does_not_cut_what_runs() -> None:
    bench = Bench()
    bench.add("a", 5, output=4, left=0.5)
    bench.step()
    bench.now += 100.0
    assert bench.scheduler.end_late(bench.now) == []
    bench.finish()
    assert bench.events[-1].finish is Finish.LENGTH


def test_what_was_preempted_and_is_late_does_not_come_back() -> None:
    bench = Bench(blocks=16, seqs=1)
    bench.add("batch", 30, output=20, priority=Priority.BATCH, left=0.5)
    bench.step()
    bench.step()
    bench.add("chat", 30, output=2, base=100)
    bench.step()
    bench.now += 1.0
    (event,) = bench.scheduler.end_late(bench.now)
    assert (event.request, event.index, event.finish) == ("batch", 2, Finish.ERROR)


@pytest.mark.parametrize("prompt", [1, 3, 4, 9, 16, 17, 70])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_prewarm_fills_the_cache_and_generates_nothing(prompt: int, chunk: int) -> None:
    bench = Bench(chunk=chunk)
    bench.add("warm", prompt, output=0)
    bench.finish()
    (event,) = bench.events
    assert (event.index, event.tokens, event.finish, event.error) == (0, (), Finish.LENGTH, None)
    assert bench.scheduler.counters.output_tokens == 0 and bench.store.pool.held == 0
    bench.add("use", prompt, output=1)
    bench.finish()
    assert bench.events[-1].cached == (prompt - 1) // 4 * 4
    bench.events.clear()
    bench.add("again", prompt, output=0)
    bench.finish()
    assert bench.events[0].cached == (prompt - 1) // 4 * 4


def test_a_prewarm_that_is_preempted_starts_over_and_ends() -> None:
    bench = Bench(blocks=16, seqs=1, budget=8, chunk=8)
    bench.add("warm", 50, output=0, priority=Priority.BATCH)
    bench.step()
    bench.add("chat", 30, output=2, base=100)
    bench.finish()
    assert bench.ended() == ["chat", "warm"]


def test_when_not_all_fit_into_a_step_they_take_turns() -> None:
    bench = Bench(blocks=64, seqs=6)
    for index in range(6):
        bench.add(f"r{index}", 4, output=8, base=10 * index)
    bench.step()
    limit(bench, max_num_batched_tokens=2)
    served: list[list[str]] = []
    for _ in range(9):
        before = len(bench.events)
        bench.step()
        served.append(sorted(event.request for event in bench.events[before:]))
    assert served[0] + served[1] + served[2] == [f"r{index}" for index in range(6)]
    assert served[3:6] == served[6:9] == served[:3]
    bench.finish()


def test_who_waits_starts_in_the_order_of_coming_and_what_ran_elsewhere_first() -> None:
    bench = Bench(seqs=1)
    bench.add("runs", 4, 2)
    bench.step()
    for name in ("first", "second"):
        bench.add(name, 4, 2)
    replay = Request("replay", (1, 2, 3), Sampling(2), b"n", attempt=1, resumed=(4,))
    bench.scheduler.add(replay, bench.now + 1.0)
    bench.finish()
    assert bench.ended() == ["runs", "replay", "first", "second"]
