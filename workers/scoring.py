"""Log-probabilities of tokens: from the logits that each rank has of its part of the vocabulary to packed values.

A rank reduces its part of a row to a few numbers; only those meet on rank 0. What comes of a row depends on that row
alone, and is the same for a token that was sampled and one that was in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workers.logprobs import Logprobs
from workers.parallel import Communicator
from workers.plan import Draw, StepPlan

SLICE = 32
"""Rows whose logits are there at one time while prompts are scored."""
_FIXED = 3
"""Numbers of a part besides its likeliest tokens: its peak, the sum of exp(logit - peak), the target's logit."""


class Scorer:
    """`project` makes this rank's logits [S, width] of hidden states; `widths` are those of all ranks."""

    def __init__(
        self, comm: Communicator, project: Callable[[Tensor], Tensor], widths: Sequence[int], device: torch.device
    ) -> None:
        self._comm = comm
        self._project = project
        self._first = ([0, *accumulate(widths)])[comm.rank]
        self._vocabulary = sum(widths)
        self._device = device

    def of_sampled(self, logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> tuple[Logprobs | None, ...]:
        """For each row of `logits` (fp32 [S, vocabulary], on rank 0) whose draw asks for it, what is to be said of its
        token; () when none does."""
        asked = [row for row, draw in enumerate(draws) if draw.top is not None]
        if not asked:
            return ()
        tops = [min(draws[row].top or 0, self._vocabulary) for row in asked]
        part = logits if len(asked) == len(draws) else logits[asked]
        targets = torch.tensor([tokens[row] for row in asked], device=self._device)
        values, ids = merge(reduce(part, targets, max(tops), 0), 1, max(tops))
        found: list[Logprobs | None] = [None] * len(draws)
        for place, (row, top) in enumerate(zip(asked, tops, strict=True)):
            found[row] = _packed(values[place : place + 1], ids[place : place + 1], top)
        return tuple(found)

    def of_prompts(self, plan: StepPlan, hidden: Tensor) -> tuple[Logprobs, ...]:
        """What the scores of a plan's rows ask for, from the hidden states [T, hidden] of its tokens: on rank 0; ()
        elsewhere. All ranks call it together."""
        places: list[int] = []
        targets: list[int] = []
        shares: list[tuple[int, int]] = []
        first = 0
        for row in plan.rows:
            if row.score is not None:
                count = len(row.score.targets)
                begin = first + row.score.first - row.start
                places += range(begin, begin + count)
                targets += row.score.targets
                shares.append((count, min(row.score.top, self._vocabulary)))
            first += len(row.tokens)
        if not shares:
            return ()
        most = max(top for _, top in shares)
        found = [
            self._slice(hidden, places[at : at + SLICE], targets[at : at + SLICE], most)
            for at in range(0, len(places), SLICE)
        ]
        if self._comm.rank:
            return ()
        values, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        ends = list(accumulate(count for count, _ in shares))
        return tuple(
            _packed(values[end - count : end], ids[end - count : end], top)
            for (count, top), end in zip(shares, ends, strict=True)
        )

    def _slice(self, hidden: Tensor, places: list[int], targets: list[int], top: int) -> tuple[Tensor, Tensor]:
        """Values and ids of some rows: on rank 0, nothing of worth elsewhere."""
        rows = hidden.index_select(0, torch.tensor(places, device=self._device))
        wanted = torch.tensor(targets, device=self._device)
        part = reduce(self._project(rows), wanted, top, self._first)
        whole = self._comm.gather_logits(part, (part.shape[1],) * self._comm.world)
        return (part, part) if whole is None else merge(whole, self._comm.world, top)


def reduce(logits: Tensor, targets: Tensor, top: int, first: int) -> Tensor:
    """What one rank knows of rows whose logits for tokens first, first + 1, … are `logits` (fp32 [S, width]): fp32 [S,
    3 + 2 * top], the peak, the sum of exp(logit - peak), the logit of `targets` [S] (-inf: another rank's), the `top`
    greatest logits and their tokens (exact, for vocabularies up to 2**24), -inf where the width does not suffice."""
    rows, width = logits.shape
    peak = logits.amax(-1, keepdim=True)
    # In fp64 the order of summation, which depends on how many rows there are, leaves no trace.
    total = (logits - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    own = targets - first
    here = (own >= 0) & (own < width)
    target = logits.gather(1, own.clamp(0, width - 1)[:, None]).masked_fill_(~here[:, None], -torch.inf)
    made = torch.full((rows, _FIXED + 2 * top), -torch.inf, device=logits.device)
    made[:, 0:1], made[:, 1:2], made[:, 2:3] = peak, total, target
    if top:
        values, ids = _greatest(logits, min(top, width))
        made[:, _FIXED : _FIXED + values.shape[1]] = values
        made[:, _FIXED + top : _FIXED + top + ids.shape[1]] = ids + first
    return made.contiguous()


def merge(parts: Tensor, world: int, top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and of the `top` likeliest tokens, fp32 [S, 1 + top], and those tokens, int32
    [S, top], from what `world` ranks know, side by side in rank order."""
    each = parts.unflatten(1, (world, _FIXED + 2 * top))
    peaks, sums, targets = each[..., 0], each[..., 1], each[..., 2]
    peak = peaks.amax(-1, keepdim=True)
    total = (sums.double() * (peaks - peak).double().exp()).sum(-1, keepdim=True)
    normaliser = peak.double() + total.log()
    values = each[..., _FIXED : _FIXED + top].flatten(1)
    ids = each[..., _FIXED + top :].flatten(1)
    if world > 1:
        values, order = values.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    own = targets.amax(-1, keepdim=True)
    # The same subtraction for a token as a target and as one of the likeliest: clients compare the two.
    told = (torch.cat([own, values[:, :top]], 1).double() - normaliser).float()
    return told, ids[:, :top].to(torch.int32)


def _greatest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest values of each row and their columns, descending; the lowest column first among equals, and the one
    that is kept where not all of them fit."""
    values, columns = logits.topk(count, sorted=False)
    least = values.amin(-1, keepdim=True)
    open_ = (logits == least).sum(-1) > (values == least).sum(-1)
    if bool(open_.any()):
        ordered = logits[open_].sort(dim=-1, descending=True, stable=True)
        values[open_], columns[open_] = ordered.values[:, :count], ordered.indices[:, :count]
    columns, order = columns.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _packed(values: Tensor, ids: Tensor, top: int) -> Logprobs:
    """The first `top` of what was found for more."""
    kept = values[:, : 1 + top].contiguous().cpu().numpy().astype("<f4", copy=False)
    names = ids[:, :top].contiguous().cpu().numpy().astype("<i4", copy=False)
    return Logprobs(top, kept.tobytes(), names.tobytes())
