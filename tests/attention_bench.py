"""Speed of native attention by KV precision: `python -m tests.attention_bench [--context N] [--batch N] [--rounds N]`.

Decode steps over a whole model's layers, so that the cache is read from memory as in service. The pairs of formats
take turns within a round, as the machine is not the same from one second to the next; what is printed is the ratio to
bf16 of the same round, the median and its quartiles. One thread, and its time on a CPU: threads of a team wait for
each other, and where the machine has other work, that is all one would see. Fails where a pair is slower than the aim.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV
from workers.attention.backend import AttentionRule
from workers.batch import Batch, Span
from workers.kvpool import KVPool
from workers.native.attention import NativeAttention
from workers.native.calls import Calls
from workers.native.library import load_library
from workers.native.pairs import PAIRS, parts_of
from workers.native.workspace import Workspace

Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
"""SmolLM2-135M's."""
BLOCK, BLOCK_BY_CHANNEL = 16, 64
AIMS = {"int8": 1.0}
OTHERS = 0.9
"""Of the others' speed in that of bf16."""


def decode(layout: KVLayout, batch: int, context: int) -> Callable[[], float]:
    """A decode step over every layer, `batch` rows of `context` normal keys and values; its time in seconds."""
    size = layout.block_size
    pool = KVPool(layout, len(layout.groups) * batch * -(-context // size), torch.device("cpu"))
    tables = torch.randperm(pool.blocks).view(batch, len(layout.groups), -1).tolist()
    backend = NativeAttention(Calls(load_library(), Workspace()), pool, [AttentionRule(HEAD_DIM**-0.5)] * LAYERS)

    def step(start: int, count: int) -> tuple[Batch, Tensor]:
        spans = tuple(Span(row * count, count, start, tuple(map(tuple, table))) for row, table in enumerate(tables))
        where = torch.arange(start, start + count).repeat(batch)
        heads = torch.randn(len(where), (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
        return Batch(torch.zeros_like(where), where, spans, where[:0], (), size), heads

    for start in range(0, context - 1, size):
        written, heads = step(start, min(size, context - 1 - start))
        backend.attend(0, heads, None, backend.prepare(written))
    for column in pool.columns[1:]:
        column.copy_(pool.columns[0])
    last, heads = step(context - 1, 1)

    def run() -> float:
        begun = time.thread_time()
        prepared = backend.prepare(last)
        for layer in range(LAYERS):
            backend.attend(layer, heads, None, prepared)
        return time.thread_time() - begun

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("context", 1500), ("batch", 8), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    layouts = {
        pair: KVLayout(
            BLOCK_BY_CHANNEL if pair[0].by_channel else BLOCK, (LayerKV.pair(KV_HEADS, HEAD_DIM, *pair),) * LAYERS
        )
        for pair in PAIRS
    }
    library = load_library(parts=[part for layout in layouts.values() for part in parts_of(layout)])
    library.threads = 1
    runs = {"-".join(p.label for p in pair): decode(layouts[pair], asked.batch, asked.context) for pair in PAIRS}
    for run in runs.values():
        run()
    seen = [{name: run() for name, run in runs.items()} for _ in range(asked.rounds)]
    found, slow = {}, False
    for name in runs:
        low, middle, high = statistics.quantiles([one["bf16-bf16"] / one[name] for one in seen], n=4)
        step = statistics.median(one[name] for one in seen)
        print(f"{name:20} {step * 1e3:7.2f} ms  {middle:5.2f} x bf16 ({low:.2f} to {high:.2f})")
        found[name] = round(middle, 3)
        slow |= middle < AIMS.get(name.split("-")[0], OTHERS)
    print(json.dumps({"context": asked.context, "batch": asked.batch, **found}))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
