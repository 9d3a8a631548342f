"""Batch: a StepPlan as tensors. It knows tokens, positions and slots; not models, heads or kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.plan import Draw, StepPlan


class Span(NamedTuple):
    """One row's share of the batch: `count` tokens from index `first` on, at positions start, start + 1, …; `tables`
    are its block ids, one table per layer group."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody misses
    start: int
    tables: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """Tokens of context that the row's last token sees, itself included."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. `tokens` and `positions` are int64 [T]; `sampled` is int64 [S], the tokens whose logits are
    wanted, with their `draws`. Tensors hold until the next batch is built."""

    tokens: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    sampled: Tensor
    draws: tuple[Draw, ...]
    block_size: int

    def slots(self, group: int) -> Tensor:
        """Where each token's key and value go in the layers of `group`, block * block_size + offset: int64 [T]. Raises
        IndexError for a row that its blocks do not cover."""
        size = self.block_size
        parts = []
        for span in self.spans:
            positions = np.arange(span.start, span.length)
            parts.append(np.asarray(span.tables[group])[positions // size] * size + positions % size)
        return torch.from_numpy(np.concatenate(parts)).to(self.tokens.device)


class Batcher:
    """Makes batches in memory that it keeps: a step allocates nothing that an earlier one had."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._room: NDArray[np.int64] = np.empty((3, 0), np.int64)
        self._shared = torch.from_numpy(self._room)

    def build(self, plan: StepPlan) -> Batch:
        """The tensors of a plan with at least one row; tokens lie in the plan's order."""
        if plan.tokens > self._room.shape[1]:
            self._room = np.empty((3, 2 * plan.tokens), np.int64)
            self._shared = torch.from_numpy(self._room)
        tokens, positions, sampled = self._room
        spans: list[Span] = []
        draws: list[Draw] = []
        wanted: list[int] = []
        first = 0
        for row in plan.rows:
            count = len(row.tokens)
            end = first + count
            spans.append(Span(first, count, row.start, row.tables))
            if count == 1:
                tokens[first] = row.tokens[0]
                positions[first] = row.start
            else:
                tokens[first:end] = row.tokens
                positions[first:end] = np.arange(row.start, row.start + count)
            if row.draw is not None:
                wanted.append(end - 1)
                draws.append(row.draw)
            first = end
        sampled[: len(wanted)] = wanted
        both = self._shared[:2, :first].to(self._device)
        last = self._shared[2, : len(wanted)].to(self._device)
        return Batch(both[0], both[1], tuple(spans), last, tuple(draws), self._block_size)


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """A batch in memory of its own."""
    return Batcher(block_size, device).build(plan)
