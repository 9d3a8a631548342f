"""The flight recorder: bounded, ready for JSON, and enough to run the plans again."""

from __future__ import annotations

import json
import time

import pytest

from tests.driver import Driver, Setup
from tests.shadow import ShadowGroup
from workers.plan import Draw, Row, StepPlan, StepResult
from workers.recorder import Recorder, replay


def plan(step: int, tokens: int = 1, blocks: int = 1) -> StepPlan:
    return StepPlan(step, (Row((5,) * tokens, 0, (tuple(range(blocks)),), Draw()),))


def test_it_keeps_the_last_plans_with_their_results_and_events() -> None:
    recorder = Recorder(steps=3)
    for step in range(1, 9):
        recorder.plan(plan(step), float(step))
        recorder.result(StepResult(step, (7,)), step + 0.5)
        if step == 7:
            recorder.note("purge", 7.7, blocks=3)
    lines = recorder.dump()
    assert [line["step"] for line in lines if line["kind"] == "plan"] == [6, 7, 8]
    assert [line["at"] for line in lines if line["kind"] == "result"][-2:] == [7.5, 8.5]
    assert {"at": 7.7, "kind": "purge", "blocks": 3} in lines


def test_it_is_bounded_by_ids_and_by_entries_too() -> None:
    recorder = Recorder(steps=100, ids=50)
    for step in range(1, 30):
        recorder.plan(plan(step, tokens=10, blocks=10), 0.0)
    assert [line["step"] for line in recorder.dump()] == [28, 29]
    recorder.plan(plan(30, tokens=500, blocks=500), 0.0)
    assert [line["step"] for line in recorder.dump()] == [30], "one plan is kept, however big"
    for _ in range(10_000):
        recorder.note("add", 0.0, request="r")
    assert len(recorder.dump()) <= 400


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("short", [0.0, 0.3])
def test_a_whole_recording_replays_to_the_same_tokens(depth: int, short: float) -> None:
    for seed in range(12):
        setup = Setup(24, 4, (None,), depth, 8, 16, 16, 5.0, True, 0.05, short=short, purges=0.02, publics=True)
        driver = Driver(seed, setup=setup)
        driver.engine.recorder = Recorder(steps=10**6, ids=10**9)
        driver.run()
        lines = [json.loads(json.dumps(line)) for line in driver.engine.recorder.dump()]
        again = replay(lines, ShadowGroup(24, 4))
        assert len(again) == driver.scheduler.step
        ran = [step for step in again if step.recorded is not None]
        assert len(ran) == sum(line["kind"] == "result" and not line["dropped"] for line in lines)
        assert all(step.recorded == step.tokens for step in ran), f"seed {seed}"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_that_begins_in_the_middle_replays_over_forgiving_ranks(depth: int) -> None:
    driver = Driver(3, setup=Setup(40, 4, (None,), depth, 8, 16, 16, 5.0, True, 0.0))
    driver.engine.recorder = Recorder(steps=20)
    driver.run()
    again = replay(driver.engine.recorder.dump(), ShadowGroup(40, 4, forgiving=True))
    assert 18 <= len(again) <= 20


class Failing(ShadowGroup):
    def launch(self, plan: StepPlan) -> object:
        if any(row.start > 30 for row in plan.rows):
            raise RuntimeError("position 31 breaks it")
        return super().launch(plan)


def test_what_broke_a_group_breaks_its_replay() -> None:
    setup = Setup(40, 4, (None,), 1, 8, 64, 64, 5.0, True, 0.0)
    driver = Driver(1, setup=setup)
    driver.engine._group = Failing(40, 4)
    with pytest.raises(RuntimeError, match="breaks"):
        driver.run()
    lines = driver.engine.recorder.dump()
    assert lines[-1]["kind"] == "dead" and "breaks" in lines[-1]["error"]
    with pytest.raises(RuntimeError, match="breaks"):
        replay(lines, Failing(40, 4))


def test_a_dump_names_no_namespace() -> None:
    driver = Driver(5, setup=Setup(24, 4, (None,), 1, 8, 16, 16, 5.0, True, 0.05, purges=0.2))
    driver.run()
    keys = {key for line in driver.engine.recorder.dump() for key in line}
    assert keys <= {"at", "kind", "step", "drops", "rows", "copy", "zero", "tokens", "seconds", "dropped", "short"} | {
        "request",
        "attempt",
        "prompt",
        "finish",
        "blocks",
        "error",
    }


def test_recording_a_step_is_cheap() -> None:
    recorder = Recorder()
    wide = StepPlan(1, tuple(Row((5,), 2000, (tuple(range(63)),), Draw()) for _ in range(256)))
    times = []
    for _ in range(50):
        began = time.perf_counter()
        recorder.plan(wide, 0.0)
        recorder.result(StepResult(1, (7,) * 256), 0.0)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.001, "a step of 256 rows takes milliseconds to plan alone"
