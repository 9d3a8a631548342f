"""Collectives through shared memory: exact sums, messages and gathers of any size, at any pace."""

from __future__ import annotations

import ctypes
import os
import random
import time
from functools import reduce

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from tests.model.tiny import in_threads
from workers.native.library import Library, load_library
from workers.segment import Segment, Watch
from workers.sharedmemory import SLOT, SharedChannel, meet

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


def channels(library: Library, world: int, *, slot: int = SLOT, timeout_s: float = 30.0) -> list[SharedChannel]:
    store = HashStore()
    return in_threads(world, lambda rank: meet(library, store, rank, world, timeout_s=timeout_s, slot=slot))


def values(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank))


def summed(world: int, count: int, seed: int = 0) -> Tensor:
    return reduce(torch.add, [values(rank, count, seed) for rank in range(world)])


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("slot", [64, 192, SLOT])
def test_a_sum_is_exact_in_rank_order_on_every_rank(library: Library, world: int, slot: int) -> None:
    group = channels(library, world, slot=slot)
    counts = [1, 16, 17, 49, 700, *([70_000, 200_001] if slot == SLOT else [])]

    def work(rank: int) -> list[Tensor]:
        sums = []
        for count in counts:
            mine = values(rank, count)
            group[rank].sum(mine)
            stream = values(99, count)
            assert group[rank].sum_onto(values(rank, count, seed=1), stream) is stream
            sums += [mine, stream]
        return sums

    for sums in in_threads(world, work):
        for count, plain, based in zip(counts, sums[::2], sums[1::2], strict=True):
            assert torch.equal(plain, summed(world, count))
            assert torch.equal(based, values(99, count) + summed(world, count, seed=1))


def test_a_stream_in_16_bit_gets_the_sum_as_well(library: Library) -> None:
    group = channels(library, 2)
    stream = values(9, 40).bfloat16()
    found = in_threads(2, lambda rank: group[rank].sum_onto(values(rank, 40), stream.clone()))
    expected = stream + summed(2, 40).bfloat16()
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("bytes_", [0, 1, 55, 56, 57, 64, 500, 10_000])
def test_a_message_of_any_length_arrives_whole(library: Library, bytes_: int) -> None:
    group = channels(library, 3, slot=64)
    message = random.Random(bytes_).randbytes(bytes_)

    def work(rank: int) -> list[bytes]:
        if rank == 0:
            for turn in range(4):
                group[0].send(message[turn:])
            return []
        return [group[rank].receive() for _ in range(4)]

    _, *received = in_threads(3, work)
    assert received == [[message[turn:] for turn in range(4)]] * 2


@pytest.mark.parametrize("widths", [(4, 3), (5, 5, 4), (1, 0, 7), (33, 32, 32, 32)])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_logits_of_uneven_widths_are_gathered_side_by_side(
    library: Library, widths: tuple[int, ...], rows: int
) -> None:
    group = channels(library, len(widths), slot=64)
    parts = [values(rank, rows * width).view(rows, width) for rank, width in enumerate(widths)]
    for _ in range(2):
        whole, *others = in_threads(len(widths), lambda rank: group[rank].gather(parts[rank].clone(), widths))
        assert torch.equal(whole, torch.cat(parts, 1))
        assert others == [None] * (len(widths) - 1)


def test_any_order_of_collectives_at_any_pace_gives_the_same(library: Library) -> None:
    """Ranks that hurry and ranks that dawdle: a slot that was written too early would show."""
    world, chooser = 3, random.Random(5)
    plan = [(chooser.choice("ssomlg"), chooser.randrange(1, 60)) for _ in range(400)]
    group = channels(library, world, slot=64)

    def work(rank: int) -> list[object]:
        pace, seen = random.Random(rank), []
        for turn, (kind, size) in enumerate(plan):
            if pace.random() < 0.05:
                time.sleep(pace.choice([0.0, 0.0005, 0.004]))
            mine = values(rank, size, seed=turn)
            channel = group[rank]
            if kind == "s":
                channel.sum(mine)
            elif kind == "o":
                mine = channel.sum_onto(mine, values(7, size))
            elif kind == "l":
                mine = torch.tensor(channel.least(turn * 10 - rank * size))
            elif kind == "m":
                if rank == 0:
                    channel.send(bytes(range(size)))
                elif channel.receive() != bytes(range(size)):
                    raise AssertionError(f"message {turn}")
                continue
            else:
                found = channel.gather(mine.view(1, -1), [size] * world)
                if found is not None and not torch.equal(
                    found.view(world, -1), torch.stack([values(other, size, seed=turn) for other in range(world)])
                ):
                    raise AssertionError(f"gather {turn}")
                continue
            seen.append((turn, mine.tolist()))
        return seen

    first, *others = in_threads(world, work)
    assert all(other == first for other in others)
    for turn, found in first:
        kind, size = plan[turn]
        if kind == "s":
            assert found == summed(world, size, turn).tolist()
        if kind == "l":
            assert found == turn * 10 - (world - 1) * size


def test_turns_may_wrap_around(library: Library) -> None:
    group = channels(library, 2)
    for rank in range(2):  # every rank's line says that it has had almost 2**32 turns
        ctypes.c_uint32.from_buffer(group[0]._segment.memory, 64 + 128 * (1 + rank)).value = 2**32 - 3
    for _ in range(8):
        assert in_threads(2, lambda rank: group[rank].least(rank + 4)) == [4, 4]


def test_wrong_tensors_are_refused_before_they_reach_the_library(library: Library) -> None:
    channel = channels(library, 2)[0]
    for tensor in (torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4)[:, :2]):
        with pytest.raises(ValueError, match="fp32"):
            channel.sum(tensor)
    with pytest.raises(ValueError, match="stream"):
        channel.sum_onto(torch.zeros(4), torch.zeros(5))
    for local, widths in ((torch.zeros(2, 3), [4, 3]), (torch.zeros(2, 3), [3]), (torch.zeros(3), [3, 3])):
        with pytest.raises(ValueError, match="widths"):
            channel.gather(local, widths)
    with pytest.raises(ValueError, match="slots"):
        SharedChannel(library, Segment.make(4096), 0, [Watch(os.getpid())] * 2, timeout_s=1)
