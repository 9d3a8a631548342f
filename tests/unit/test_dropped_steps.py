"""Steps for which a rank has no memory: dropped everywhere, taken back, tried again in smaller parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.store import KVStore
from tests.shadow import ShadowGroup, expected_output
from workers.budget import GOOD_STEPS
from workers.engine import Engine
from workers.plan import Finish, GroupDead, Limits, StepPlan
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling


class Bench:
    """An engine over ranks that `short` may leave without memory; every plan that was launched."""

    def __init__(self, short: Callable[[StepPlan], bool], *, depth: int = 1, budget: int = 64) -> None:
        self.store = KVStore(64, 4)
        self.scheduler = Scheduler(self.store, Limits(8, budget, budget), max_model_len=200)
        self.plans: list[StepPlan] = []
        self.group = ShadowGroup(64, 4, short=self.note(short))
        self.engine = Engine(self.scheduler, self.group, name="g", epoch=1, depth=depth, lease_s=1e9)
        self.box = self.engine.subscribe("i", lambda: None, 0.0)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}

    def note(self, short: Callable[[StepPlan], bool]) -> Callable[[StepPlan], bool]:
        def ask(plan: StepPlan) -> bool:
            self.plans.append(plan)
            return short(plan)

        return ask

    def submit(self, name: str, prompt: int = 10, output: int = 6, base: int = 0) -> Request:
        request = Request(name, tuple(range(base, base + prompt)), Sampling(output), name.encode(), grant=name)
        self.engine.submit("i", request)
        return request

    def run(self, turns: int = 400) -> None:
        while not self.engine.idle:
            self.turn()
            turns -= 1
            assert turns, "no end in sight"

    def turn(self) -> None:
        self.engine.turn(0.0)
        self.store.check()
        message = self.box.read()
        for event in message.events if message else ():
            self.tokens.setdefault(event.request, []).extend(event.tokens)
            if event.finish:
                self.ends[event.request] = event.finish

    def check(self, *requests: Request) -> None:
        for request in requests:
            sampling = request.sampling
            want = expected_output(request.prompt, sampling.max_tokens, sampling.draw(0), 97, frozenset())
            assert (self.tokens[request.id], self.ends[request.id]) == (want, Finish.LENGTH)
        assert self.store.pool.held == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", range(1, 7))
def test_one_step_without_memory_costs_nobody_a_token(depth: int, step: int) -> None:
    bench = Bench(lambda plan: plan.step == step, depth=depth)
    requests = [bench.submit("a"), bench.submit("b", 7, 9, base=50), bench.submit("c", 30, 2, base=90)]
    bench.run()
    bench.check(*requests)
    assert bench.scheduler.counters.ooms == bench.group.drops == 1


def test_a_plan_that_builds_on_a_dropped_one_is_dropped_and_not_short() -> None:
    bench = Bench(lambda plan: plan.step == 3, depth=2)
    requests = [bench.submit("a"), bench.submit("b", base=50)]
    bench.run()
    bench.check(*requests)
    results = [line for line in bench.engine.recorder.dump() if line["kind"] == "result"]
    assert [line["step"] for line in results if line["dropped"]] == [3, 4]
    assert [line["step"] for line in results if line["short"]] == [3]
    drops = {line["step"]: line["drops"] for line in bench.engine.recorder.dump() if line["kind"] == "plan"}
    assert (drops[3], drops[4], drops[5]) == (0, 0, 1)


def test_a_dropped_step_is_not_counted_as_computed_or_recomputed() -> None:
    calm, rough = Bench(lambda plan: False), Bench(lambda plan: plan.step == 2)
    for bench in (calm, rough):
        bench.submit("a")
        bench.submit("b", base=50)
        bench.run()
    assert rough.scheduler.counters.computed_tokens == calm.scheduler.counters.computed_tokens
    assert rough.scheduler.counters.recomputed_tokens == 0


def test_the_step_is_tried_again_with_half_the_tokens_and_rows_and_grows_back() -> None:
    bench = Bench(lambda plan: plan.step == 1, budget=32)
    requests = [bench.submit("a", 32, 120)]
    bench.run()
    bench.check(*requests)
    assert [plan.tokens for plan in bench.plans[:3]] == [32, 16, 16]
    wide = Bench(lambda plan: plan.step == 2)
    requests = [wide.submit(name, 4, 20, base=10 * ord(name)) for name in "abcdefgh"]
    wide.run()
    wide.check(*requests)
    assert [len(plan.rows) for plan in wide.plans[:3]] == [8, 8, 4]
    again = [wide.submit(name, 4, 20, base=10 * ord(name)) for name in "ijklmnop"]
    wide.run()
    wide.check(*again)
    rows = [len(plan.rows) for plan in wide.plans]
    assert max(rows[2 : 2 + GOOD_STEPS]) == 4 and max(rows[2 + GOOD_STEPS : 2 + 2 * GOOD_STEPS]) == 5


@pytest.mark.parametrize("most", [1, 2, 5, 11])
def test_ranks_that_never_have_memory_for_more_than_a_few_tokens_still_finish_everything(most: int) -> None:
    bench = Bench(lambda plan: plan.tokens > most)
    requests = [bench.submit(name, 9, 7, base=30 * ord(name)) for name in "abcd"]
    bench.run(4000)
    bench.check(*requests)


def test_no_memory_for_one_token_of_one_sequence_is_a_dead_group() -> None:
    bench = Bench(lambda plan: True)
    bench.submit("a")
    with pytest.raises(GroupDead, match="no memory"):
        bench.run()
    assert isinstance(bench.engine.dead, GroupDead) and bench.box.closed
    assert (len(bench.plans[-1].rows), bench.plans[-1].tokens) == (1, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_leaves_while_its_step_is_dropped_leaves_nothing(depth: int) -> None:
    for step in range(1, 7):
        bench = Bench(lambda plan, step=step: plan.step == step, depth=depth)
        other = bench.submit("b", base=50)
        bench.submit("a")
        while len(bench.plans) < step:
            bench.turn()
        bench.engine.abort("a", 0)
        bench.run()
        bench.check(other)


def test_copies_and_zeroes_of_a_dropped_plan_count_as_done() -> None:
    bench = Bench(lambda plan: bool(plan.zero) and plan.drops == 0)
    first = bench.submit("a")
    bench.run()
    assert bench.engine.purge(b"a") is not None
    second = bench.submit("b", base=50)
    bench.run()
    bench.check(first, second)
    assert bench.scheduler.counters.ooms == 1 and bench.store.pool.dirty == 0
