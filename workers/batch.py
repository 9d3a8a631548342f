"""Batch: a StepPlan as tensors. It knows tokens, positions and slots; not models, heads or kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.plan import Draw, Row, StepPlan


@dataclass(frozen=True, slots=True)
class Span:
    """One row's share of the batch: `count` tokens from index `first` on, at positions start, start + 1, …; `table`
    are its block ids."""

    first: int
    count: int
    start: int
    table: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of context that the row's last token sees, itself included."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. `tokens`, `positions` and `slots` (block * block_size + offset, where each token's key and
    value go) are int64 [T]; `sampled` is int64 [S], the tokens whose logits are wanted, with their `draws`."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    sampled: Tensor
    draws: tuple[Draw, ...]


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """The tensors of a plan with at least one row; tokens lie in the plan's order."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    sampled: list[int] = []
    draws: list[Draw] = []
    for row in plan.rows:
        spans.append(Span(len(tokens), len(row.tokens), row.start, row.tables[0]))
        tokens.extend(row.tokens)
        positions.extend(range(row.start, row.start + len(row.tokens)))
        _extend_slots(slots, row, block_size)
        if row.draw is not None:
            sampled.append(len(tokens) - 1)
            draws.append(row.draw)
    # One transfer for what has one length.
    ids, places, targets = torch.tensor([tokens, positions, slots], device=device).unbind(0)
    wanted = torch.tensor(sampled, dtype=torch.int64, device=device)
    return Batch(ids, places, targets, tuple(spans), wanted, tuple(draws))


def _extend_slots(slots: list[int], row: Row, block_size: int) -> None:
    table = row.tables[0]
    if len(row.tokens) == 1:
        slots.append(table[row.start // block_size] * block_size + row.start % block_size)
        return
    positions = np.arange(row.start, row.start + len(row.tokens))
    slots.extend((np.asarray(table)[positions // block_size] * block_size + positions % block_size).tolist())
