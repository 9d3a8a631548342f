"""What is left of a dead group: one readable file, private, whose plans can be run again; and not too many of them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.autopsy import KEPT, write_autopsy
from workers.plan import Draw, Row, StepPlan, StepResult
from workers.recorder import Recorder, replay
from workers.stacks import RankState, ThreadStack, thread_stacks

STATE = RankState(0, 321, 17, 2, 4100, "all_reduce", (ThreadStack("work", ("a.py:1 f: g()",)),))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_says_who_died_where_each_rank_was_and_what_ran_last(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.plan(StepPlan(17, (Row((5, 6), 0, ((1,),), Draw()),)), 1.0)
    recorder.note("dead", 2.0, error="gone")
    recording = "".join(json.dumps(line) + "\n" for line in recorder.dump())
    path = write_autopsy(
        tmp_path / "new" / "folder", "svc-r#1-2", {"why": "hung", "epoch": 4}, [STATE, "no answer"], recording
    )
    death, zero, one, plan, last = read(path)
    assert death == {"kind": "death", "incarnation": "svc-r#1-2", "why": "hung", "epoch": 4}
    assert (zero["rank"], zero["step"], zero["collectives"], zero["collective"]) == (0, 17, 4100, "all_reduce")
    assert zero["stacks"] == [{"thread": "work", "frames": ["a.py:1 f: g()"]}]
    assert one == {"kind": "rank", "rank": 1, "silent": "no answer"}
    assert plan["step"] == 17 and last["error"] == "gone"


def test_the_plans_in_it_can_be_run_again(tmp_path: Path) -> None:
    recorder = Recorder()
    for step in (1, 2):
        recorder.plan(StepPlan(step, (Row((5,), step, ((1,),), Draw()),)), step)
        recorder.result(StepResult(step, (step * 10,)), step)
    recording = "".join(json.dumps(line) + "\n" for line in recorder.dump())
    path = write_autopsy(tmp_path, "g", {"why": "x"}, [STATE], recording)
    ran: list[StepPlan] = []

    class Ranks:
        def launch(self, plan: StepPlan) -> object:
            ran.append(plan)
            return StepResult(plan.step, (plan.rows[0].start * 10,))

        def wait(self, handle: object) -> StepResult:
            assert isinstance(handle, StepResult)
            return handle

    assert [step.tokens == step.recorded for step in replay(read(path), Ranks())] == [True, True]
    assert len(ran) == 2


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_autopsy(tmp_path, "g", {}, [], "")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("mine")
    os.utime(other, (0, 0))
    for number in range(KEPT + 5):
        path = write_autopsy(tmp_path, f"g{number}", {}, [], "")
        os.utime(path, (1000 + number, 1000 + number))
    write_autopsy(tmp_path, "last", {}, [], "")
    names = {path.name for path in tmp_path.glob("tidegate-flight-*")}
    assert names == {"tidegate-flight-last.jsonl", *(f"tidegate-flight-g{n}.jsonl" for n in range(6, KEPT + 5))}
    assert other.read_text() == "mine"


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "a b#c"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    assert write_autopsy(tmp_path, name, {}, [], "").parent == tmp_path


def test_the_stacks_show_where_other_threads_wait() -> None:
    inside, over = threading.Event(), threading.Event()

    def wait_for_the_others() -> None:
        inside.set()
        over.wait(10)

    thread = threading.Thread(target=wait_for_the_others, name="step thread")
    thread.start()
    inside.wait(10)
    stacks = {stack.thread: stack.frames for stack in thread_stacks()}
    over.set()
    thread.join()
    assert any("wait_for_the_others: over.wait(10)" in frame for frame in stacks["step thread"])
    assert "MainThread" not in stacks, "who asks is of no interest"
