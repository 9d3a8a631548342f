"""A node of which Ray says that it goes: its groups move away, what cannot end in time is replayed, nothing is left on
it, and it can be taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.util.placement_group import placement_group, remove_placement_group

import deploy.app
from cluster.bundles import Resources, total
from cluster.group import HANDOVER_S
from deploy.config import ClusterConfig
from tests.ray import workload
from tests.ray.second_node import SecondNode
from tests.ray.stage import PATIENCE_S, Stage, eventually
from tests.ray.workload import Answer, Job

pytestmark = pytest.mark.slow

CPUS = 2
"""Of either node."""
TOKENS = 1000
HEAD: Resources = {"node:__internal_head__": 0.001}
MOVED_S = 120.0
"""How long a machine full of other work may need to bring up a group elsewhere and to empty the node."""
SOON_S = HANDOVER_S + 3.0
"""A notice too short for a long answer to end, and for Serve to wait until another group stands."""
LONG: list[Job] = [
    {"prompt": "The harbour master wrote", "max_tokens": 8000},
    {"prompt": [23] * 40, "max_tokens": 8000, "temperature": 0.8, "top_k": 20, "seed": 5},
    {"prompt": "Far out at sea", "max_tokens": 8000, "temperature": 0.8, "top_k": 20, "seed": 6},
]

Streams = list[tuple[Job, Answer]]


@pytest.fixture(scope="module")
def streams(stage: Stage, tiny_config: ClusterConfig) -> Streams:
    """What to ask, and what comes when nobody disturbs it."""
    stage.show(tiny_config)
    work = workload.jobs(stage, TOKENS)
    return list(zip(work, workload.run_all(stage, work), strict=True))


@pytest.fixture
def second(stage: Stage, streams: Streams) -> Iterator[SecondNode]:
    node = SecondNode(stage.link, CPUS)
    yield node
    node.kill()
    eventually(lambda: not node.is_alive)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress stays on the head node: the streams of one that is killed are lost."""
    build = deploy.app._ingresses

    def on_head(*arguments: Any) -> Any:
        return build(*arguments).options(ray_actor_options={"num_cpus": 0.01, "resources": HEAD})

    monkeypatch.setattr(deploy.app, "_ingresses", on_head)


def test_streams_go_on_when_a_group_and_the_ingress_leave_with_their_node(
    stage: Stage, tiny_config: ClusterConfig, streams: Streams, second: SecondNode
) -> None:
    remove(stage)
    with taken([{"CPU": CPUS, **HEAD}]):
        stage.show(tiny_config.model_copy(update={"groups": 1}))
    assert len(groups_on(second, stage)) == 1 and second.runs(workload.replicas("ingress")[0].pid)
    with asked_all_the_time(stage, streams):
        second.give_notice(MOVED_S)
        eventually(lambda: not second.is_alive, MOVED_S)  # Ray ends a node that nobody needs
    second.take_away()
    workload.settle(stage, groups=1, ranks=1)
    check(stage, streams)


@pytest.mark.usefixtures("pinned")
def test_of_two_groups_one_leaves_with_its_node_and_another_has_come_before(
    stage: Stage, tiny_config: ClusterConfig, streams: Streams, second: SecondNode
) -> None:
    show_apart(stage, tiny_config, second)
    with asked_all_the_time(stage, streams):
        second.give_notice(MOVED_S)
        up = eventually(lambda: leaving(second, stage) and [row for row in stage.groups() if row["state"] == "up"])
        assert len(up) == 2, "the other one first"
        eventually(lambda: not second.is_alive, MOVED_S)
    second.take_away()
    workload.settle(stage, groups=2, ranks=1)
    check(stage, streams)


@pytest.mark.usefixtures("pinned")
def test_what_cannot_end_before_its_node_goes_is_replayed_before(
    stage: Stage, tiny_config: ClusterConfig, streams: Streams, second: SecondNode
) -> None:
    show_apart(stage, patient(tiny_config), second)
    with reading_long_answers(stage):
        deadline = second.give_notice(SOON_S)
        eventually(lambda: leaving(second, stage), SOON_S)
        eventually(lambda: not second.leftovers(), deadline - time.monotonic())
        eventually(lambda: not second.is_alive)
    second.take_away()
    workload.settle(stage, groups=2, ranks=1)
    check(stage, streams)


@pytest.mark.usefixtures("pinned")
def test_what_still_runs_when_its_node_goes_is_replayed(
    stage: Stage, tiny_config: ClusterConfig, streams: Streams, second: SecondNode
) -> None:
    """Sooner than it was said to."""
    show_apart(stage, patient(tiny_config), second)
    with reading_long_answers(stage):
        second.give_notice(SOON_S)
        eventually(lambda: leaving(second, stage), SOON_S)
        second.kill()
        eventually(lambda: not second.is_alive)
    assert not second.leftovers()
    workload.settle(stage, groups=2, ranks=1)
    check(stage, streams)


def patient(config: ClusterConfig) -> ClusterConfig:
    """Answers may take longer to end than any notice of these tests leaves them."""
    return config.model_copy(update={"drain_s": 60.0})


def show_apart(stage: Stage, config: ClusterConfig, second: SecondNode) -> None:
    """Two groups, one on either node: there is room for one on each while they come up, for both on each afterwards."""
    remove(stage)
    (demand,) = deploy.app.make_plan(config, Path(config.model)).demands
    rest = CPUS - total(demand.bundles)["CPU"] - 0.05
    with taken([{"CPU": rest}, {"CPU": rest}]):
        stage.show(config)
    assert len(groups_on(second, stage)) == 1


def remove(stage: Stage) -> None:
    """The next service begins anew, so that its groups go to where there is room."""
    if stage.shown is not None:
        with suppress(TimeoutError):  # after a minute; answers may take as long to end
            serve.delete(stage.shown.service_name)
        eventually(lambda: not serve.status().applications)
        stage.shown = None


@contextmanager
def taken(bundles: Sequence[Resources]) -> Iterator[None]:
    """While this lasts, somebody else has got these, each on a node of its own."""
    place = placement_group(list(bundles), strategy="STRICT_SPREAD")
    assert place.wait(PATIENCE_S)
    try:
        yield
    finally:
        remove_placement_group(place)


@contextmanager
def asked_all_the_time(stage: Stage, streams: Streams) -> Iterator[None]:
    """While this lasts each stream is asked for again and again, and brings what it always does; it begins when each
    is under way."""
    over, under_way = threading.Event(), threading.Barrier(len(streams) + 1)

    def ask(job: Job, expected: Answer) -> None:
        assert workload.run(stage, job, await_others(under_way)) == expected
        while not over.is_set():
            assert workload.run(stage, job) == expected

    with ThreadPoolExecutor(len(streams)) as pool:
        asked = [pool.submit(ask, *stream) for stream in streams]
        try:
            under_way.wait(60)
            yield
        finally:
            over.set()
        for answer in asked:
            answer.result()


@contextmanager
def reading_long_answers(stage: Stage) -> Iterator[None]:
    """While this lasts, and a little longer, answers are read that would last longer still; all of what was read is
    what comes undisturbed. It begins when each is under way."""
    over, chunks = threading.Event(), [0] * len(LONG)

    def read(number: int, enough: Callable[[str], bool]) -> str:
        text = ""
        for chunk in stage.stream(**LONG[number]):
            text += chunk["choices"][0]["text"]
            chunks[number] += 1
            if enough(text):
                return text
        raise AssertionError(f"answer {number} ended by itself, with {chunk}")

    def await_more() -> None:
        seen = tuple(chunks)
        eventually(lambda: all(now > before + workload.WARM_CHUNKS for now, before in zip(chunks, seen, strict=True)))

    with ThreadPoolExecutor(len(LONG)) as pool:
        reading = [pool.submit(read, number, lambda _: over.is_set()) for number in range(len(LONG))]
        try:
            await_more()
            yield
            await_more()
        finally:
            over.set()
        said = [answer.result() for answer in reading]

        def read_again(number: int) -> str:
            size = len(said[number])
            return read(number, lambda text: len(text) >= size)[:size]

        assert list(pool.map(read_again, range(len(LONG)))) == said


def await_others(barrier: threading.Barrier) -> Callable[[int], None]:
    return lambda count: barrier.wait(60) if count == workload.WARM_CHUNKS else None


def check(stage: Stage, streams: Streams) -> None:
    """What is left answers as ever."""
    work, expected = zip(*streams, strict=True)
    assert workload.run_all(stage, work) == list(expected)


def groups_on(node: SecondNode, stage: Stage) -> list[dict[str, Any]]:
    return [row for row in stage.groups() if node.runs(row["ranks"][0]["pid"])]


def leaving(node: SecondNode, stage: Stage) -> bool:
    """Whether a group on `node` takes nothing new, and still has something running."""
    return any(row["state"] == "leaving" and row["running"] for row in groups_on(node, stage))
