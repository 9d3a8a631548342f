"""How ranks find each other, by memory or gloo, and how a group ends: in time on every rank, whoever hangs up, is
killed or stands still, with nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, Store

from tests.model.forked_rank import ForkedRank, add_up, join, meeting, say_nothing, wait_for_plans
from tests.model.tiny import HOST, in_threads
from workers.native.library import Library, load_library
from workers.parallel import Communicator, join_store, open_store
from workers.plan import Row, StepPlan
from workers.segment import NotShared, Segment
from workers.sharedmemory import SharedChannel, meet

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
SOON_S = 5.0
"""Three times what a rank may take to notice, and more."""


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


def channels(library: Library, world: int, timeout_s: float = 30.0) -> list[SharedChannel]:
    store = HashStore()
    return in_threads(world, lambda rank: meet(library, store, rank, world, timeout_s=timeout_s))


def connected(library: Library | None, store: Store, rank: int, world: int, timeout_s: float = 30.0) -> Communicator:
    return Communicator.connect(store, rank, world, host=HOST, device=CPU, timeout_s=timeout_s, library=library)


def test_plans_pass_and_an_end_too(library: Library) -> None:
    store = HashStore()
    comms = in_threads(2, lambda rank: connected(library, store, rank, 2))
    plan = StepPlan(3, (Row((1, 2), 0, (tuple(range(100_000)),)),))
    sent = threading.Thread(target=lambda: [comms[0].broadcast_plan(each) for each in (plan, None)])
    sent.start()
    assert comms[0].transport == comms[1].transport == "shared memory"
    assert comms[1].receive_plan() == plan
    assert comms[1].receive_plan() is None
    sent.join(10)
    assert comms[1].calls == 2 and comms[1].last == "broadcast"


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_the_library_brings_all_to_gloo(library: Library, without: int) -> None:
    store, address = open_store(HOST)

    def work(rank: int) -> tuple[str, float, int]:
        comm = connected(None if rank == without else library, store if rank == 0 else join_store(address), rank, 2)
        stream = comm.all_reduce_onto(torch.tensor([float(rank + 1)]), torch.tensor([10.0]))
        least = comm.min_flag(rank)
        return comm.transport, stream.item(), least

    assert in_threads(2, work) == [("gloo", 13.0, 0)] * 2


@pytest.mark.parametrize("told", [{"space": "elsewhere"}, {"descriptor": 0}, {"name": "00"}, {"size": 4096}])
def test_memory_that_is_not_the_one_told_of_is_refused(told: dict[str, object]) -> None:
    segment = Segment.make(8192)
    invitation = json.loads(segment.invitation())
    assert Segment.join(json.dumps(invitation).encode()).memory[:16] == segment.memory[:16]
    with pytest.raises(NotShared):
        Segment.join(json.dumps(invitation | told).encode())
    segment.let_go()
    with pytest.raises(NotShared):
        Segment.join(json.dumps(invitation).encode())


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("call", ["sum", "least", "receive", "gather"])
def test_a_rank_that_hangs_up_wakes_those_that_wait_in_any_collective(library: Library, call: str) -> None:
    group = channels(library, 2)
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: group[1].sum(torch.zeros(3)),
        "least": lambda: group[1].least(1),
        "receive": group[1].receive,
        "gather": lambda: [group[1].gather(torch.zeros(1, 1), (1, 1)) for _ in range(3)],
    }
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="hung up"):
            calls[call]()
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)  # asleep by now
    began = time.monotonic()
    group[0].close()
    thread.join(SOON_S)
    assert ended and ended[0] - began < SOON_S


def test_a_rank_may_hang_up_on_itself_from_another_thread_and_then_cannot_go_on(library: Library) -> None:
    store = HashStore()
    comms = in_threads(2, lambda rank: connected(library, store, rank, 2))
    threading.Timer(0.1, comms[0].close).start()
    with pytest.raises(RuntimeError, match="hung up"):
        comms[0].min_flag(1)
    comms[1].min_flag(1)  # rank 0 had had its say
    for comm in comms:
        with pytest.raises(RuntimeError, match="hung up"):
            comm.min_flag(1)
    comms[0].close()


def test_what_was_sent_before_hanging_up_still_arrives(library: Library) -> None:
    group = channels(library, 2)
    group[0].send(b"the last")
    group[0].close()
    assert group[1].receive() == b"the last"
    with pytest.raises(RuntimeError, match="hung up"):
        group[1].receive()


def test_a_sender_learns_at_once_that_nobody_listens(library: Library) -> None:
    group = channels(library, 2)
    group[1].close()
    with pytest.raises(RuntimeError, match="hung up"):
        group[0].send(b"anyone?")


def test_a_rank_that_does_not_come_is_named_when_time_is_up(library: Library) -> None:
    group = channels(library, 3, timeout_s=0.3)
    words = in_threads(3, lambda rank: "" if rank == 2 else failure(lambda: group[rank].least(1)))
    assert "rank 2 has not come to a collective for 0.3 s" in words
    assert set(words[:2]) <= {"rank 2 has not come to a collective for 0.3 s", "a rank of the group has hung up"}


@pytest.fixture
def pair() -> Iterator[tuple[Communicator, ForkedRank]]:
    """Rank 0 here and rank 1 in another process; both are adding up."""
    _store, address = meeting()
    child = ForkedRank(address, 1, 2, add_up)
    comm = join(address, 0, 2, timeout_s=0.5)
    for _ in range(50):
        assert comm.all_reduce(torch.ones(5000))[0] == 2
    yield comm, child
    child.kill()


def test_a_killed_rank_is_noticed_by_one_that_waits(pair: tuple[Communicator, ForkedRank]) -> None:
    comm, child = pair
    child.stop()
    killer = threading.Timer(0.2, child.kill)
    killer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        for _ in range(3):  # it may have posted the next one before it was stopped
            comm.all_reduce(torch.ones(5000))
    assert time.monotonic() - began < SOON_S
    killer.join()


def test_a_killed_rank_is_noticed_by_one_that_sends(pair: tuple[Communicator, ForkedRank]) -> None:
    comm, child = pair
    child.kill()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        comm.broadcast_plan(None)


def test_a_stopped_rank_is_given_up_in_time_and_learns_of_it(pair: tuple[Communicator, ForkedRank]) -> None:
    comm, child = pair
    child.stop()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has not come"):
        for _ in range(3):
            comm.all_reduce(torch.ones(5000))
    assert 0.4 < time.monotonic() - began < SOON_S
    child.resume()
    assert child.last_words() == "a rank of the group has hung up"


def test_a_rank_that_waits_for_a_plan_does_not_spin() -> None:
    _store, address = meeting()
    ranks = [ForkedRank(address, rank, 2, wait_for_plans if rank else say_nothing) for rank in range(2)]
    stat = Path(f"/proc/{ranks[1].pid}/stat")

    def used() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    ranks[1].wait_until_met()
    time.sleep(0.2)
    before = used()
    time.sleep(0.6)
    assert used() - before < 0.1
    for rank in ranks:
        rank.kill()


def mapped(pid: int) -> int:
    """How many segments process `pid` has mapped; none of them may have a name that outlives it."""
    lines = [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "tidegate" in line and " rw-s " in line
    ]
    assert all("/memfd:tidegate (deleted)" in line for line in lines), lines
    return len(lines)


def test_a_group_that_has_hung_up_holds_no_memory(library: Library) -> None:
    gc.collect()
    before = mapped(os.getpid())
    store = HashStore()
    comms = in_threads(3, lambda rank: connected(library, store, rank, 3))
    assert mapped(os.getpid()) == before + 3
    for comm in comms:
        comm.close()
    gc.collect()
    assert mapped(os.getpid()) == before


@pytest.mark.parametrize(("first", "others"), [(add_up, add_up), (say_nothing, wait_for_plans)])
def test_all_others_learn_that_a_rank_was_killed_and_nothing_is_left(
    first: Callable[[Communicator], None], others: Callable[[Communicator], None]
) -> None:
    _store, address = meeting()
    ranks = [ForkedRank(address, rank, 3, others if rank else first) for rank in range(3)]
    for rank in ranks:
        rank.wait_until_met()
    assert all(mapped(rank.pid) for rank in ranks)
    time.sleep(0.2)
    ranks[0].kill()
    assert {rank.last_words() for rank in ranks[1:]} <= {
        "the process of rank 0 has ended",
        "a rank of the group has hung up",
    }
    for rank in ranks[1:]:
        rank.kill()
