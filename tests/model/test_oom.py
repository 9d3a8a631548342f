"""A rank without memory: the step is dropped on all ranks, nothing is lost, and what is said comes out the same."""

from __future__ import annotations

import random
import resource
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvstore.layout import Precision
from tests.model.localgroup import LocalGroup
from tests.model.test_lead import Group
from tests.model.tiny import FAMILIES, Ranks, prompt, row, save_model
from workers.footprint import can_allocate, is_out_of_memory
from workers.plan import PENDING, Draw, Row, StepPlan, StepResult
from workers.runner import Runner
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

TABLE = (5, 0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    save_model(FAMILIES["smollm2"], path)
    return path


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)], ids=lambda pair: f"tp{pair[0]}-rank{pair[1]}")
def group(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Group, Ranks, Runner]]:
    """A group, and the rank in it that will be short."""
    world, short = request.param
    ranks = Ranks(folder, world)
    made = Group(ranks)
    yield made, ranks, ranks.runners[short]
    made.lead.stop()
    made.join()
    ranks.close()
    assert made.errors == []


def refuse(runner: Runner, steps: set[int]) -> None:
    """This rank has no memory for these steps."""
    able = runner.reserve
    runner.reserve = lambda plan: plan.step not in steps and able(plan)  # type: ignore[method-assign]


def run(group: Group, *plans: StepPlan) -> list[StepResult]:
    """All of them in flight at once."""
    handles = [group.lead.launch(plan) for plan in plans]
    return [replace(group.lead.wait(handle), seconds=0.0) for handle in handles]


def test_what_builds_on_a_dropped_step_is_dropped_with_it_and_run_again_with_the_same_tokens(
    folder: Path, group: tuple[Group, Ranks, Runner]
) -> None:
    made, ranks, short = group
    first = StepPlan(1, (row(prompt(9), 0, TABLE),))
    second = StepPlan(2, (Row((PENDING,), 9, (TABLE,), Draw(), source=0),))
    undisturbed = Ranks(folder)
    tokens = [int(undisturbed.logits(first.rows[0]).argmax())]
    tokens.append(int(undisturbed.logits(row(tokens, 9, TABLE)).argmax()))
    refuse(short, {1, 4})
    assert run(made, first, second) == [
        StepResult(1, (), dropped=True, short=True),
        StepResult(2, (), dropped=True),
    ]
    assert run(made, replace(first, step=3, drops=1)) == [StepResult(3, (tokens[0],))]
    assert [runner.drops for runner in ranks.runners] == [1] * ranks.world
    after = replace(second, rows=(row(tokens[:1], 9, TABLE),), drops=1)
    assert run(made, replace(after, step=4)) == [StepResult(4, (), dropped=True, short=True)]
    assert run(made, replace(after, step=5)) == [StepResult(5, (), dropped=True)], "planned before the drop was known"
    assert run(made, replace(after, step=6, drops=2)) == [StepResult(6, (tokens[1],))]


def test_a_dropped_step_still_copies_and_zeroes_and_touches_nothing_else(group: tuple[Group, Ranks, Runner]) -> None:
    made, ranks, short = group
    run(made, StepPlan(1, (row(prompt(12), 0, TABLE),)))
    pools = [runner.pool for runner in ranks.runners if runner.pool is not None]
    before = [[page.clone() for page in pool.pages] for pool in pools]
    refuse(short, {2, 4})
    drop = StepPlan(2, (row(prompt(9, seed=3), 0, (7, 8, 9)), row([4], 12, (*TABLE, 1))), copy=((5, 6),), zero=(0,))
    assert run(made, drop)[0].short
    assert run(made, replace(drop, step=3, copy=((2, 4),), zero=(5,)))[0] == StepResult(3, (), dropped=True)
    # Another agreement: no rank is behind.
    assert run(made, replace(drop, step=4, copy=(), zero=(), drops=1))[0].short
    for pool, pages in zip(pools, before, strict=True):
        for page, old in zip(pool.pages, pages, strict=True):
            old[6], old[4] = old[5], old[2]
            old[[0, 5]] = 0
            assert torch.equal(page, old)
    assert run(made, StepPlan(5, zero=(6,))) == [StepResult(5, ())], "housekeeping builds on nothing"


class Shortages:
    """Every rank is short now and then, by its own dice, but not for one token: that would be the end."""

    def __init__(self, seed: int, share: float) -> None:
        self.count = 0
        self._seed = seed
        self._share = share

    def install(self, rank: int, runner: Runner) -> None:
        dice = random.Random(self._seed * 10 + rank)
        able = runner.reserve

        def reserve(plan: StepPlan) -> bool:
            return (dice.random() >= self._share or plan.tokens == 1) and able(plan)

        runner.reserve = reserve  # type: ignore[method-assign]


def requests() -> list[Request]:
    """Long and short, greedy and seeded, two of them with a common head."""
    head = prompt(24, seed=9)
    kinds = [Sampling(max_tokens=25), Sampling(temperature=0.9, top_p=0.9, seed=5, max_tokens=31)]
    prompts = [head + prompt(3, seed=1), prompt(70, seed=2), head + prompt(40, seed=3), prompt(5, seed=4)]
    return [
        Request(f"r{number}", tuple(tokens), kinds[number % 2], bytes(32), grant=f"g{number}")
        for number, tokens in enumerate(prompts * 2)
    ]


def serve(folder: Path, world: int, overlap: int, shortages: Shortages | None) -> tuple[dict[str, list[int]], int]:
    """What a whole group generates, and how many steps it dropped for want of memory."""
    settings = GroupSettings(
        model_dir=str(folder),
        model_names=("tiny",),
        tensor_parallel_size=world,
        dtype="fp32",
        block_size=16,
        kv_memory=2**24,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        overlap=overlap,
        threads=1,
    )
    with LocalGroup(settings, blocks=28) as local:
        for rank, part in enumerate(local.ranks):
            if shortages:
                shortages.install(rank, part.runner)
        outputs = local.generate(requests())
        return outputs, local.report().ooms


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, list[int]]:
    return serve(folder, 1, 1, None)[0]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shortages_at_random_cost_steps_and_no_token(
    folder: Path, undisturbed: dict[str, list[int]], world: int, overlap: int
) -> None:
    outputs, dropped = serve(folder, world, overlap, Shortages(seed=world, share=0.15))
    assert outputs == undisturbed
    assert dropped >= 3


def test_an_allocator_that_says_no_drops_the_step_and_nothing_else(folder: Path) -> None:
    """In a process of its own: one that has run other tests has more address space lying about than any step takes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        fresh.submit(meet_a_real_refusal, folder).result(timeout=120)


def meet_a_real_refusal(folder: Path) -> None:
    """The real allocator, held to an address space a little larger than what the process has."""
    ranks = Ranks(folder)
    group = Group(ranks)
    large = StepPlan(1, tuple(row(prompt(60, seed=seed), 0, (seed % 64,) * 15) for seed in range(2400)))
    small = StepPlan(2, (row(prompt(9), 0, TABLE),), drops=1)
    # An arena of glibc's holds 64 MiB of address space that it may not have used yet.
    assert max(ranks.runners[0]._demand.buffers(large)) > 2 * 2**26, "more than the process may have lying about"
    with address_space(2**22):
        assert not can_allocate([2**30], torch.device("cpu"))
        assert run(group, large)[0].short
    assert len(run(group, small)[0].tokens) == 1
    group.lead.stop()
    group.join()
    ranks.close()


class address_space:
    """This process may grow by `spare` bytes and no more."""

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._before = resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + self._spare, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
            True,
        ),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
    ],
)
def test_only_an_allocator_s_refusal_is_a_shortage(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_memory: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    assert is_out_of_memory(error) == is_memory
    monkeypatch.setattr(torch, "empty", fail)
    if is_memory:
        assert can_allocate([8], torch.device("cpu")) is False
    else:
        with pytest.raises(RuntimeError, match="size of tensor"):
            can_allocate([8], torch.device("cpu"))


class Peak(TorchDispatchMode):
    """Follows the bytes of all tensors that operators have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.bytes -= self._seen.pop(key)


def measured(work: Callable[[], object]) -> int:
    with Peak() as peak:
        work()
    return peak.most


PLANS = {
    "one chunk": StepPlan(1, (row(prompt(60), 0, tuple(range(15))),)),
    "a chunk far in": StepPlan(1, (row(prompt(40), 200, tuple(range(60))),)),
    "one token": StepPlan(1, (row([3], 11, TABLE),)),
    "eight at once": StepPlan(1, tuple(row([3], 100 + seed, tuple(range(30))) for seed in range(8))),
    "a mixture": StepPlan(
        1,
        (*(row([3], 9 * seed, tuple(range(30))) for seed in range(1, 8)), row(prompt(40), 24, tuple(range(16)), None)),
    ),
    "sampled": StepPlan(1, tuple(row([3], seed, TABLE, Draw(temperature=1.0, top_p=0.9)) for seed in range(1, 9))),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PLANS)
def test_what_a_step_asks_for_is_about_what_it_takes(folder: Path, name: str, dtype: str) -> None:
    compare(folder, name, dtype)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "minicpm3"])
def test_so_it_is_with_experts_and_latents(tmp_path: Path, family: str) -> None:
    save_model(FAMILIES[family], tmp_path)
    for name in PLANS:
        compare(tmp_path, name, "fp32")


def compare(folder: Path, name: str, dtype: str) -> None:
    """What is asked for plan `name` with what it takes."""
    ranks = Ranks(folder, kernels=f"torch-{dtype}", dtype=dtype, precision=Precision.parse(dtype))
    runner, plan = ranks.runners[0], PLANS[name]
    runner.run(plan)
    taken = measured(lambda: runner.run(plan))
    asked = sum(runner._demand.buffers(plan))
    assert 0.8 * taken <= asked <= 1.5 * taken, f"{name}: asked for {asked:,}, took {taken:,}"


def test_a_measured_largest_step_scales_what_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Ranks(folder).runners[0]
    asked: list[list[int]] = []
    monkeypatch.setattr("workers.runner.can_allocate", lambda sizes, device: asked.append(sizes) or True)
    largest = sum(runner._demand.buffers(runner._largest()))
    for found in (largest, 2 * largest, 1000 * largest):
        monkeypatch.setattr("workers.runner.peak_bytes", lambda work, device, found=found: found)
        assert runner.profile() == found
        runner.reserve(PLANS["a mixture"])
    first, second, third = map(sum, asked)
    assert second == pytest.approx(2 * first, rel=0.01) and third == pytest.approx(4 * first, rel=0.01)
