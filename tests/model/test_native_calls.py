"""Sequences of native kernels are recorded and replayed: the same numbers as when they are called one by one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from workers.native.calls import Calls
from workers.native.kernels import NativeKernels
from workers.native.library import Library, load_library
from workers.native.workspace import Workspace

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    yield load_library()


class Owner:
    """Whoever recordings belong to."""


class Stack:
    """Three parts in a row, on one residual stream; counts how often Python went through them."""

    def __init__(self, library: Library) -> None:
        self.kernels = NativeKernels(library)
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(32, 48, generator=generator).bfloat16()
        self.norm = self.kernels.norm(torch.rand(48, generator=generator), 1e-5, slot="normed")
        self.inner = self.kernels.linear(weight, None, slot="inner")
        self.out = self.kernels.adding(weight.T.contiguous(), None)
        self.walks = 0

    def through(self, stream: torch.Tensor) -> torch.Tensor:
        self.walks += 1
        return self.out(self.inner(self.norm(stream)), stream)

    def replayed(self, owner: object, stream: torch.Tensor) -> torch.Tensor:
        return self.kernels.replay(owner, (stream,), lambda: self.through(stream))


def test_what_is_replayed_computes_with_the_values_of_now(library: Library) -> None:
    owner, recorded, plain = Owner(), Stack(library), Stack(library)
    stream = torch.empty(3, 48)
    for seed in range(4):
        torch.manual_seed(seed)
        values = torch.randn(3, 48)
        expected = plain.through(values.clone())
        got = recorded.replayed(owner, stream.copy_(values))
        assert got is stream and torch.equal(got, expected)
    assert recorded.walks == 2  # the first time its buffers were made meanwhile


def test_other_parts_and_other_owners_have_recordings_of_their_own(library: Library) -> None:
    stack, owners = Stack(library), (Owner(), Owner())
    streams = [torch.zeros(rows, 48) for rows in (5, 2, 5)]
    stack.through(streams[0])  # the workspace has its size from now on
    for _ in range(2):
        for owner in owners:
            for stream in streams:
                stack.replayed(owner, stream)
    assert stack.walks == 1 + 6


def test_a_workspace_that_has_moved_is_recorded_anew(library: Library) -> None:
    stack, owner, small = Stack(library), Owner(), torch.ones(2, 48)
    expected = Stack(library).through(torch.ones(2, 48))
    stack.replayed(owner, small)  # its buffers are made meanwhile: not kept
    stack.replayed(owner, small.fill_(1))
    stack.replayed(owner, small.fill_(1))
    assert stack.walks == 2
    stack.replayed(owner, torch.ones(200, 48))  # larger: buffers move
    assert torch.equal(stack.replayed(owner, small.fill_(1)), expected) and stack.walks == 4


def test_recordings_end_with_their_owner(library: Library) -> None:
    stack, owner, stream = Stack(library), Owner(), torch.ones(2, 48)
    stack.replayed(owner, stream)
    stack.replayed(owner, stream)
    kept = weakref.ref(stream)
    del stream
    assert kept() is not None
    del owner
    gc.collect()
    stack.replayed(Owner(), torch.ones(2, 48))
    gc.collect()
    assert kept() is None


def test_work_that_fails_is_not_recorded(library: Library) -> None:
    calls, owner = Calls(library, Workspace()), Owner()

    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            calls.replay(owner, (), fail)
    assert calls.tape is None and calls.replay(owner, (), lambda: 7) == 7


def test_arguments_that_a_kernel_refuses_are_an_error(library: Library) -> None:
    stack = Stack(library)
    stack.inner._product.out_stride = 1
    with pytest.raises(RuntimeError, match="tg_linear refused its arguments"):
        stack.through(torch.ones(2, 48))
