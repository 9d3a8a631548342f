"""What tests of native attention run over: builds of the library, and pairs of formats."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.layout import Precision
from workers.native.library import Library
from workers.native.pairs import PAIRS
from workers.native.processor import Processor

VARIANTS = [variant.name for variant in Processor.read().variants]
CLOSE = 0.02
"""Of weighted means of normal values: their own rounding to bf16 is up to 0.008."""
Pair = tuple[Precision, Precision]
ALIKE = [pair for pair in PAIRS if pair[0] is pair[1]]
BY_TOKEN = [pair for pair in PAIRS if not pair[0].by_channel]
"""Keys by channel have tests of their own: test_channel_keys."""
BUILDS = [(variant, pair) for variant in VARIANTS for pair in (BY_TOKEN if variant == VARIANTS[0] else ALIKE)]
"""Every pair of formats in the build for this CPU; in the others every format, which is all that a pair is made of."""


def label(pair: object) -> str:
    """How a pair shows among a test's parameters."""
    return "-".join(precision.label for precision in pair) if isinstance(pair, tuple) else str(pair)


def one_thread(library: Library) -> Iterator[Library]:
    """Where tests run side by side, two threads that wait for each other take their time."""
    before = library.threads
    library.threads = 1
    yield library
    library.threads = before
