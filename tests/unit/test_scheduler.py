"""The scheduler's policies, one by one, over shadow ranks."""

from __future__ import annotations

import pytest

from tests.scheduler_bench import Bench
from workers.admission import MAX_BLOCKED_S, MAX_BYPASSED
from workers.plan import PENDING, Finish
from workers.sequence import Priority, Request, Sampling


def test_decodes_come_first_and_prefills_fill_the_budget() -> None:
    bench = Bench(budget=10, chunk=8)
    bench.add("old", 3)
    bench.step()
    bench.add("new", 20, base=100)
    plan = bench.step()
    assert plan is not None
    assert [(len(row.tokens), row.draw is not None) for row in plan.rows] == [(1, True), (8, False)]


def test_a_prompt_is_admitted_whole_or_not_at_all() -> None:
    bench = Bench(blocks=10, budget=4)
    bench.add("a", 24)
    bench.step()
    assert bench.store.pool.held == 7 - 1, "24 tokens of prompt take 6 blocks at once"
    bench.add("b", 20, base=100)
    bench.step()
    assert bench.running() == ["a"], "5 more do not fit beside them"


def test_the_watermark_holds_blocks_back_unless_nothing_runs() -> None:
    bench = Bench(blocks=10, watermark=0.3)
    bench.add("a", 32)
    bench.step()
    assert bench.running() == ["a"], "a lone request may have the whole pool"
    bench.add("b", 4, base=100)
    bench.step()
    assert bench.running() == ["a"]


def test_a_small_request_passes_a_big_one_that_does_not_fit_but_not_for_ever() -> None:
    bench = Bench(blocks=16, budget=64)
    bench.add("first", 16, output=40)
    bench.step()
    bench.add("big", 50, base=100, output=2)
    for index in range(MAX_BYPASSED + 5):
        bench.add(f"small{index}", 3, output=1, base=200 + 10 * index)
        bench.step()
    passed = [name for name in bench.ended() if name.startswith("small")]
    assert 0 < len(passed) <= MAX_BYPASSED
    bench.finish()
    order = bench.ended()
    assert order.index("big") < order.index(f"small{MAX_BYPASSED + 4}")


def test_a_big_request_that_waited_long_holds_the_line() -> None:
    bench = Bench(blocks=16)
    bench.add("first", 16, output=40)
    bench.step()
    bench.add("big", 50, base=100, output=2)
    bench.step()
    bench.now += MAX_BLOCKED_S
    bench.add("small", 3, output=1, base=200)
    bench.step()
    assert "small" not in bench.ended()


def test_a_sequence_that_cannot_grow_preempts_the_lowest_class_first() -> None:
    bench = Bench(blocks=8)
    bench.add("batch", 7, output=12, priority=Priority.BATCH, base=50)
    bench.add("one", 7, output=12)
    bench.add("two", 7, output=12, base=100)
    bench.finish()
    assert sorted(bench.ended()) == ["batch", "one", "two"]
    assert bench.ended()[-1] == "batch"
    assert bench.scheduler.counters.preemptions > 0


def test_interactive_takes_room_and_slot_from_batch() -> None:
    bench = Bench(blocks=16, seqs=1)
    bench.add("batch", 30, output=20, priority=Priority.BATCH)
    bench.step()
    assert bench.running() == ["batch"]
    bench.add("chat", 30, output=2, base=100)
    bench.step()
    assert bench.running() == ["chat"]
    bench.finish()
    assert bench.ended() == ["chat", "batch"]


def test_a_preempted_sequence_waits_for_its_whole_length_and_growth() -> None:
    bench = Bench(blocks=12)
    bench.add("a", 14, output=30)
    bench.add("b", 14, output=30, base=100)
    bench.finish()
    assert sorted(bench.ended()) == ["a", "b"]
    assert bench.scheduler.counters.preemptions <= 2, "it must not come back only to be preempted again"


def test_an_abort_frees_everything_at_once() -> None:
    bench = Bench()
    bench.add("a", 10, output=50)
    bench.add("b", 10, output=50, base=100)
    bench.step()
    event = bench.scheduler.abort("a", 0, bench.now)
    assert event is not None and event.finish is Finish.ABORT
    assert bench.running() == ["b"]
    assert bench.scheduler.abort("a", 0, bench.now) is None
    assert bench.scheduler.abort("b", 0, bench.now) is not None
    assert bench.store.pool.held == 0


def test_aborting_a_waiting_or_preempted_sequence_leaves_nothing() -> None:
    bench = Bench(seqs=1)
    bench.add("a", 10, output=50)
    bench.add("b", 10, base=100)
    bench.step()
    assert bench.scheduler.abort("b", 0, bench.now) is not None
    assert len(bench.scheduler.waiting) == 0


def test_a_request_that_can_never_fit_is_named_with_numbers() -> None:
    bench = Bench(blocks=8)
    obstacle = bench.scheduler.obstacle(Request("x", tuple(range(30)), Sampling(10), b""))
    assert obstacle is not None and "need 10 blocks" in obstacle and "has 8" in obstacle
    assert bench.scheduler.obstacle(Request("x", tuple(range(22)), Sampling(10), b"")) is None
    too_long = bench.scheduler.obstacle(Request("x", tuple(range(990)), Sampling(11), b""))
    assert too_long is not None and "1000 tokens" in too_long


def test_a_second_step_may_be_planned_before_the_first_is_known() -> None:
    bench = Bench()
    bench.add("a", 5, output=3)
    first = bench.scheduler.schedule(bench.now)
    second = bench.scheduler.schedule(bench.now)
    assert first is not None and second is not None
    assert second.rows[0].tokens == (PENDING,) and second.rows[0].source == 0
    assert bench.scheduler.schedule(bench.now) is not None
    assert bench.scheduler.schedule(bench.now) is None, "max_tokens is reached, whatever is sampled"


def test_the_same_prompt_is_computed_once_and_its_last_token_always() -> None:
    bench = Bench()
    bench.add("a", 16, output=1)
    bench.finish()
    bench.add("b", 16, output=1)
    plan = bench.step()
    assert plan is not None
    assert plan.rows[0].start == 12 and len(plan.rows[0].tokens) == 4
    assert bench.events[-1].cached == 12


def test_expired_contents_are_zeroed_before_anybody_gets_them() -> None:
    bench = Bench()
    bench.add("a", 16, output=1)
    bench.finish()
    assert bench.store.pool.idle == 4
    bench.now += 1000.0
    plan = bench.step()
    assert plan is not None and len(plan.zero) == 4 and not plan.rows
    assert bench.store.pool.free == bench.store.total


def test_resumed_output_is_computed_again_and_counted() -> None:
    bench = Bench()
    bench.add("whole", 9, output=6)
    bench.finish()
    output = [event.tokens[0] for event in bench.events]
    bench.events.clear()
    request = Request("again", tuple(range(9)), Sampling(6), b"n", attempt=1, resumed=tuple(output[:2]))
    bench.scheduler.add(request, bench.now)
    bench.finish()
    assert [event.index for event in bench.events] == [2, 3, 4, 5]
    assert [event.tokens[0] for event in bench.events] == output[2:]


@pytest.mark.parametrize("seqs", [1, 2, 5])
def test_slots_bound_what_runs(seqs: int) -> None:
    bench = Bench(seqs=seqs, blocks=64)
    for index in range(6):
        bench.add(f"r{index}", 4, output=3, base=10 * index)
    bench.step()
    assert len(bench.running()) == min(seqs, 6)
    bench.finish()
    assert len(bench.ended()) == 6
