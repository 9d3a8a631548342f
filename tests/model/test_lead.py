"""Lead and follow: plans in order over real ranks, tokens still pending, a rank that dies, an end that ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.tiny import FAMILIES, HOST, Ranks, connect, prompt, row, save_model
from workers.lead import Lead, fill_pending, follow
from workers.parallel import Communicator, open_store
from workers.plan import PENDING, Draw, GroupDead, Row, StepPlan

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    save_model(FAMILIES["smollm2"], path)
    return path


class Group:
    """A lead and its followers over `ranks`."""

    def __init__(self, ranks: Ranks, idle_s: float = 5.0) -> None:
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._follow, args=(ranks, rank)) for rank in range(1, ranks.world)]
        for thread in self.threads:
            thread.start()
        self.lead = Lead(ranks.runners[0], ranks.comms[0], idle_s=idle_s)

    def _follow(self, ranks: Ranks, rank: int) -> None:
        try:
            follow(ranks.runners[rank], ranks.comms[rank])
        except Exception as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(params=[1, 2, 3])
def ranks(folder: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(folder, request.param)
    yield made
    made.close()


def greedy_alone(folder: Path, tokens: list[int], count: int, table: tuple[int, ...]) -> list[int]:
    ranks = Ranks(folder)
    output = [int(ranks.logits(row(tokens, 0, table)).argmax())]
    while len(output) < count:
        output.append(int(ranks.logits(row(output[-1:], len(tokens) + len(output) - 1, table)).argmax()))
    return output


def test_two_plans_in_flight_give_what_one_at_a_time_gives(folder: Path, ranks: Ranks) -> None:
    group = Group(ranks)
    prompts = [prompt(9, seed=1), prompt(14, seed=2)]
    places = [(0, 5, 2, 9, 11, 12), (7, 1, 3, 4, 8, 13)]
    expected = [greedy_alone(folder, *pair) for pair in zip(prompts, [8, 8], places, strict=True)]
    first = StepPlan(0, tuple(row(tokens, 0, table) for tokens, table in zip(prompts, places, strict=True)))
    handles = [group.lead.launch(first)]
    for step in range(1, 8):
        # The rows swap places at every step: `source` says which sampled row is meant.
        order = (1, 0)
        now = order if step % 2 else (0, 1)
        rows = tuple(
            Row(
                (PENDING,),
                len(prompts[who]) + step - 1,
                (places[who],),
                Draw(),
                source=order.index(who) if step > 1 and not step % 2 else who,
            )
            for who in now
        )
        handles.append(group.lead.launch(StepPlan(step, rows)))
    results = [group.lead.wait(handle) for handle in handles]
    group.lead.stop()
    group.join()
    assert [result.step for result in results] == list(range(8))
    for who in (0, 1):
        got = [result.tokens[(1 - who) if step % 2 else who] for step, result in enumerate(results)]
        assert got == expected[who]
    assert group.errors == []


def test_a_long_plan_reaches_every_rank(folder: Path, ranks: Ranks) -> None:
    group = Group(ranks)
    table = tuple(range(60))
    plan = StepPlan(0, (row(prompt(240), 0, table),), copy=tuple((60, 61) for _ in range(3000)), zero=(62,) * 3000)
    token = group.lead.wait(group.lead.launch(plan)).tokens[0]
    group.lead.stop()
    group.join()
    assert token == int(Ranks(folder).logits(row(prompt(240), 0, table)).argmax())


def test_an_idle_group_stays_usable_and_sends_empty_plans(ranks: Ranks) -> None:
    seen: list[StepPlan | None] = []
    send = ranks.comms[0].broadcast_plan
    idle = threading.Event()

    def watched(plan: StepPlan | None) -> None:
        seen.append(plan)
        if len(seen) >= 3:
            idle.set()
        send(plan)

    ranks.comms[0].broadcast_plan = watched  # type: ignore[method-assign]
    group = Group(ranks, idle_s=0.02)
    assert idle.wait(10)
    assert len(group.lead.wait(group.lead.launch(StepPlan(4, (row([3], 0, (1,)),)))).tokens) == 1
    group.lead.stop()
    group.join()
    assert seen[0] is not None and seen[0].rows == ()
    assert seen[-1] is None


@pytest.mark.parametrize("where", ["reserve", "compute"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_rank_kills_the_group_at_once(folder: Path, where: str, rank: int) -> None:
    """Before the ranks have agreed that all have memory, and after it."""
    ranks = Ranks(folder, 3)

    def break_down(plan: StepPlan) -> tuple[int, ...]:
        raise MemoryError("no more")

    setattr(ranks.runners[rank], where, break_down)
    group = Group(ranks)
    began = time.monotonic()
    handles = [group.lead.launch(StepPlan(step, (row([3], 0, (1,)),))) for step in range(3)]
    for handle in handles:
        with pytest.raises(GroupDead):
            group.lead.wait(handle)
    group.join()
    group.lead.stop()
    assert time.monotonic() - began < 10
    assert len(group.errors) == 2
    assert any(isinstance(error, MemoryError) for error in group.errors) == (rank == 2)
    with pytest.raises(GroupDead):
        group.lead.wait(group.lead.launch(StepPlan(9)))


def test_a_failing_lead_ends_the_followers(folder: Path) -> None:
    ranks = Ranks(folder, 2)
    group = Group(ranks)
    with pytest.raises(GroupDead, match="step 0"):
        group.lead.wait(group.lead.launch(StepPlan(0, (row([3], 400, (1,)),))))
    group.join()
    assert len(group.errors) == 1
    group.lead.stop()


def test_after_stop_a_plan_is_refused(ranks: Ranks) -> None:
    group = Group(ranks)
    last = group.lead.launch(StepPlan(0, (row([3], 0, (1,)),)))
    group.lead.stop()
    assert len(group.lead.wait(last).tokens) == 1
    with pytest.raises(GroupDead):
        group.lead.wait(group.lead.launch(StepPlan(1)))
    group.lead.stop()
    group.join()
    assert group.errors == []


def test_a_source_that_was_not_sampled_is_an_error() -> None:
    plan = StepPlan(3, (Row((PENDING,), 4, ((0, 1),), Draw(), source=1),))
    assert fill_pending(plan, (7, 8)).rows[0].tokens == (8,)
    with pytest.raises(ValueError, match="source 1"):
        fill_pending(plan, (7,))


def test_a_seed_draws_the_same_at_every_degree(folder: Path) -> None:
    outputs = []
    for world in (1, 2, 3):
        ranks = Ranks(folder, world)
        group = Group(ranks)
        draws = [Draw(temperature=0.9, top_p=0.9, seed=11, position=position) for position in range(20)]
        output = list(group.lead.wait(group.lead.launch(StepPlan(0, (row(prompt(6), 0, (2, 4), draws[6]),)))).tokens)
        while len(output) < 12:
            place = 5 + len(output)
            plan = StepPlan(place, (row(output[-1:], place, (2, 4, 6, 8, 10), draws[place + 1]),))
            output += group.lead.wait(group.lead.launch(plan)).tokens
        group.lead.stop()
        group.join()
        outputs.append(output)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) > 3


def test_the_least_flag_wins_and_the_store_listens_on_its_host_only() -> None:
    store, address = open_store(HOST)
    port = int(address.rpartition(":")[2])
    listening = [
        place
        for path in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(path).read_text().splitlines()[1:]
        if (place := line.split()[1]).endswith(f":{port:04X}")
    ]
    assert f"0100007F:{port:04X}" in listening
    assert f"{'0' * 32}:{port:04X}" not in listening
    assert f"{'0' * 8}:{port:04X}" not in listening
    del store
    comms = connect(3)
    flags: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda comm=comm: flags.update({comm.rank: comm.min_flag(comm.rank != 1)}))
        for comm in comms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert flags == {0: 0, 1: 0, 2: 0}
    assert Communicator.alone().min_flag(1) == 1
    for comm in comms:
        comm.close()
        comm.close()
