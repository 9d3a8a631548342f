"""Whatever dies, clients get what they would have got: every row of DESIGN 7 but the lost node, on a real Ray.

Each test runs streams of several kinds, kills something while they run, compares with an undisturbed run, and wants
the service whole and empty afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from cluster.registry import NAMESPACE, find_coordinator
from deploy.config import ClusterConfig
from tests.ray import workload
from tests.ray.stage import Stage, eventually
from tests.ray.workload import Answer, Job

ROUNDS = pytest.mark.parametrize(
    "turn",
    [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 10))],
)
"""Once in --all, ten times in --long."""
STEP_TIMEOUT_S = 6.0
TOKENS = 500
POISON = 4242
"""A token that kills the process that computes it, once `poisoned` has been at it."""

Served = tuple[Stage, list[Job], list[Answer]]


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flights")


@pytest.fixture(scope="module")
def base(tiny_config: ClusterConfig, flights: Path) -> ClusterConfig:
    return tiny_config.model_copy(update={"step_timeout_s": STEP_TIMEOUT_S, "flight_dir": str(flights)})


def serve(stage: Stage, config: ClusterConfig) -> Served:
    """The service, its streams, and what they say when nobody disturbs them."""
    changed = stage.shown != config
    stage.show(config)
    if changed or not hasattr(stage, "undisturbed"):
        work = workload.jobs(stage, TOKENS)
        stage.undisturbed = work, workload.run_all(stage, work)  # type: ignore[attr-defined]
    return stage, *stage.undisturbed  # type: ignore[attr-defined]


@pytest.fixture
def pair(stage: Stage, base: ClusterConfig) -> Served:
    """Two groups of one rank."""
    return serve(stage, base)


@pytest.fixture
def single(stage: Stage, base: ClusterConfig) -> Served:
    """One group of two ranks."""
    return serve(stage, base.model_copy(update={"groups": 1, "tensor_parallel_size": 2}))


@ROUNDS
def test_the_streams_of_a_killed_rank_go_on_in_the_other_group(pair: Served, turn: int) -> None:
    stage, work, expected = pair
    assert workload.run_all(stage, work, lambda: kill_rank(busiest(stage), 0)) == expected
    workload.settle(stage, groups=2, ranks=1)


@ROUNDS
@pytest.mark.parametrize("rank", [0, 1])
def test_the_streams_of_a_killed_rank_go_on_when_its_only_group_is_rebuilt(
    single: Served, flights: Path, turn: int, rank: int
) -> None:
    stage, work, expected = single
    before, files = busiest(stage), set(flights.iterdir())
    assert workload.run_all(stage, work, lambda: kill_rank(busiest(stage), rank)) == expected
    workload.settle(stage, groups=1, ranks=2)
    after = stage.groups()[0]
    assert after["epoch"] > before["epoch"] and after["restarts"] == before["restarts"] + 1
    assert not pids(after) & pids(before), "all ranks of a group die together"
    ranks, plans = read_flight(only(set(flights.iterdir()) - files))
    assert "silent" in ranks[rank] and ranks[1 - rank]["stacks"]
    assert bool(plans) == (rank == 1), "rank 0 keeps the recording"


@ROUNDS
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_found_and_replaced_and_it_is_written_down_where_the_others_were(
    single: Served, flights: Path, turn: int, rank: int
) -> None:
    stage, work, expected = single
    files = set(flights.iterdir())
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        os.kill(busiest(stage)["ranks"][rank]["pid"], signal.SIGSTOP)
        eventually(lambda: set(flights.iterdir()) - files, STEP_TIMEOUT_S + 8)
        stopped.append(time.monotonic())

    assert workload.run_all(stage, work, stop) == expected
    assert stopped[1] - stopped[0] < STEP_TIMEOUT_S + 5
    workload.settle(stage, groups=1, ranks=2)
    ranks, plans = read_flight(only(set(flights.iterdir()) - files))
    assert "no answer" in ranks[rank]["silent"]
    waiting = ranks[1 - rank]
    assert waiting["collective"] and waiting["collectives"] > 100
    assert any("workers/parallel.py" in frame for stack in waiting["stacks"] for frame in stack["frames"])
    if rank == 1:
        assert plans[-1]["step"] >= waiting["step"] > 10


@ROUNDS
def test_the_streams_of_a_killed_owner_go_on(pair: Served, turn: int) -> None:
    stage, work, expected = pair
    before = {group["group"] for group in stage.groups()}
    assert workload.run_all(stage, work, lambda: workload.replicas("group")[0].kill()) == expected
    eventually(lambda: len({group["group"] for group in stage.groups()} - before) == 1)
    eventually(lambda: len(stage.groups()) == 2, 60)
    workload.settle(stage, groups=2, ranks=1)


@ROUNDS
def test_no_stream_notices_that_the_coordinator_died(pair: Served, turn: int) -> None:
    stage, work, expected = pair

    def kill() -> None:
        ray.kill(find_coordinator("tidegate"), no_restart=False)

    epochs = {group["group"]: group["epoch"] for group in stage.groups()}
    back: list[float] = []

    def kill_and_wait() -> None:
        began = time.monotonic()
        kill()
        eventually(lambda: workload.answers(lambda: len(up(stage, epochs)) == 2), 30)
        back.append(time.monotonic() - began)

    assert workload.run_all(stage, work, kill_and_wait) == expected
    assert back[0] < 15, "three times the aim"
    kill()
    assert workload.run_all(stage, work) == expected, "asked while the coordinator is away"
    workload.settle(stage, groups=2, ranks=1)


@ROUNDS
def test_what_a_killed_ingress_was_waiting_for_is_aborted(pair: Served, turn: int) -> None:
    stage, work, expected = pair
    with ThreadPoolExecutor(4) as pool:
        cut = [pool.submit(cut_off, stage, [number + 3] * 20) for number in range(4)]
        eventually(lambda: stage.total("running") == 4)
        workload.replicas("ingress")[0].kill()
        assert all(answer.result() for answer in cut)
    assert stage.total("held") > 0, "the groups go on until the lease is over"
    eventually(lambda: stage.total("running") == 0, 20)
    eventually(lambda: workload.answers(lambda: workload.run(stage, {"prompt": "hello", "max_tokens": 2})))
    workload.settle(stage, groups=2, ranks=1)
    assert workload.run_all(stage, work) == expected


@ROUNDS
def test_the_blocks_of_a_killed_client_come_back(pair: Served, turn: int) -> None:
    stage, work, expected = pair
    code = f"""
import httpx
body = {{"model": "tiny", "prompt": [9] * 30, "max_tokens": 8000, "ignore_eos": True, "stream": True}}
with httpx.stream("POST", "{stage.url}/v1/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""

    def kill_client() -> None:
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        for _ in range(10):
            client.stdout.readline()
        client.kill()
        client.wait()

    assert workload.run_all(stage, work, kill_client) == expected
    began = time.monotonic()
    workload.settle(stage, groups=2, ranks=1)
    assert time.monotonic() - began < 4, "sooner than any lease lapses"


@ROUNDS
def test_a_request_that_kills_its_groups_ends_with_one_error_and_its_neighbours_finish(pair: Served, turn: int) -> None:
    stage, work, expected = pair
    restarts = stage.total("restarts")
    with poisoned(), ThreadPoolExecutor(1) as pool:
        poison: list[Any] = []

        def ask() -> httpx.Response:
            body = {"model": "tiny", "prompt": [POISON] * 20, "max_tokens": 5}
            return httpx.post(f"{stage.url}/v1/completions", json=body, timeout=120)

        assert workload.run_all(stage, work, lambda: poison.append(pool.submit(ask))) == expected
        answer = poison[0].result()
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "poisoned_request"
        workload.settle(stage, groups=2, ranks=1)
    assert stage.total("restarts") - restarts == 3, "in company, in company once more, alone"


@contextmanager
def poisoned() -> Iterator[None]:
    """While this lasts, every rank process, those that are yet to come included, dies of a plan with POISON in it."""

    def arm(actor: object, token: int) -> None:
        import os
        import time

        from workers.runner import Runner

        compute = Runner.compute

        def fatal(self: Runner, plan: Any) -> Any:
            if any(token in row.tokens for row in plan.rows):
                time.sleep(0.3)  # whoever submitted it knows by then that it was taken
                os._exit(1)
            return compute(self, plan)

        Runner.compute = fatal  # type: ignore[method-assign]

    over, armed = threading.Event(), set()

    def watch() -> None:
        while not over.wait(0.05):
            for actor in ray.util.list_named_actors(all_namespaces=True):
                if actor["namespace"] == NAMESPACE and actor["name"].endswith("-rank0") and actor["name"] not in armed:
                    handle = workload.answers(lambda name=actor["name"]: ray.get_actor(name, NAMESPACE))
                    if handle is not None:
                        armed.add(actor["name"])
                        handle.__ray_call__.remote(arm, POISON)

    thread = threading.Thread(target=watch)
    thread.start()
    eventually(lambda: len(armed) >= 2)
    try:
        yield
    finally:
        over.set()
        thread.join()


def busiest(stage: Stage) -> dict[str, Any]:
    return max(stage.groups(), key=lambda group: group["running"])


def kill_rank(group: dict[str, Any], rank: int) -> None:
    os.kill(group["ranks"][rank]["pid"], signal.SIGKILL)


def pids(group: dict[str, Any]) -> set[int]:
    return {rank["pid"] for rank in group["ranks"]}


def up(stage: Stage, epochs: dict[str, int]) -> list[str]:
    """Groups that have joined again since `epochs`."""
    return [
        group["group"] for group in stage.groups() if group["state"] == "up" and group["epoch"] > epochs[group["group"]]
    ]


def cut_off(stage: Stage, prompt: list[int]) -> bool:
    """Whether the stream broke off."""
    try:
        list(stage.stream(prompt, max_tokens=8000))
    except (httpx.HTTPError, AssertionError):
        return True
    return False


def only(found: set[Path]) -> Path:
    (path,) = found
    return path


def read_flight(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The states of all ranks, and the plans."""
    assert path.stat().st_mode & 0o077 == 0, "there are parts of prompts in it"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["kind"] == "death" and lines[0]["why"]
    ranks = [line for line in lines if line["kind"] == "rank"]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    return ranks, [line for line in lines if line["kind"] == "plan"]
