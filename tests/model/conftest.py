"""Ranks as threads share the cores: one computing thread each keeps them from spinning against each other.

And the builds of the native library that tests of its attention run with.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model import builds
from workers.native import library as loading


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with one thread per rank while the test runs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=builds.BUILDS, ids=lambda build: f"{build[0]}-{builds.label(build[1])}")
def build(request: pytest.FixtureRequest) -> Iterator[tuple[loading.Library, builds.Pair]]:
    """A library and the formats of keys and values."""
    variant, pair = request.param
    for library in builds.one_thread(loading.load_library(variant=variant)):
        yield library, pair


@pytest.fixture
def fastest() -> Iterator[loading.Library]:
    """The library for this processor."""
    yield from builds.one_thread(loading.load_library())
