"""What a group counts: victims' order, blocks per request, steps by size, contents that could have been there."""

from __future__ import annotations

from tests.scheduler_bench import Bench
from workers.preemption import choose_victim
from workers.sequence import Priority, Request, Sampling


def test_victims_are_the_lowest_class_and_then_the_cheapest_recompute_per_block() -> None:
    bench = Bench(blocks=64)
    bench.add("shared", 32, output=20)
    bench.finish()
    bench.add("costly", 34, output=20)
    bench.add("costly too", 34, output=20)
    bench.add("cheap", 10, output=20, base=200)
    bench.add("batch", 30, output=20, priority=Priority.BATCH, base=300)
    bench.step()
    running = {s.request.id: s for s in bench.scheduler.running}
    order = []
    while len(running) > 1:
        victim = choose_victim(bench.store, running.values(), running["costly too"])
        assert victim is not None
        order.append(victim.request.id)
        del running[victim.request.id]
    assert order == ["batch", "cheap", "costly"]


def test_what_ended_is_counted_by_the_most_blocks_that_it_held() -> None:
    bench = Bench(blocks=64)
    for index, prompt in enumerate((3, 4, 8, 30)):
        bench.add(f"r{index}", prompt, output=1, base=50 * index)
    bench.add("waits", 3)
    bench.scheduler.abort("waits", 0, bench.now)
    bench.finish()
    assert bench.scheduler.request_blocks.counts == [2, 1, 0, 1]


def test_steps_are_counted_by_their_rows_rounded_up_to_a_power_of_two() -> None:
    bench = Bench()
    for index in range(3):
        bench.add(f"r{index}", 4, output=2 + index, base=10 * index)
    bench.finish()
    rows = [(row.rows, row.steps, row.sampled, row.computed) for row in bench.scheduler.steps.rows()]
    assert rows == [(1, 1, 1, 1), (2, 1, 2, 2), (4, 2, 6, 15)]


def test_expired_and_foreign_contents_are_counted_once_per_request() -> None:
    bench = Bench()
    bench.add("a", 17, output=1)
    bench.finish()
    foreign = Request("foreign", tuple(range(17)), Sampling(1), b"other")
    bench.scheduler.add(foreign, bench.now)
    bench.finish()
    assert (bench.scheduler.counters.expired_asked, bench.scheduler.counters.lost_to_scope) == (0, 16)
    bench.now += 1000.0
    bench.add("b", 17, output=1)
    bench.finish()
    assert (bench.scheduler.counters.expired_asked, bench.scheduler.counters.lost_to_scope) == (16, 16)
