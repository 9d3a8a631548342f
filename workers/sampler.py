"""sample: logits and draws to tokens. A row's token depends on its own logits, its seed and its position only.

Order of the filters: temperature, top-k, top-p (of what top-k left), min-p (relative to the likeliest token). Each
keeps the tokens at or above a probability, so tokens tied at a cut all stay. The token is found by inverse CDF in
vocabulary order: tiny differences in logits move a boundary a little instead of reordering the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.plan import Draw

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits 1e-4 apart already differ by e^10 there."""

_WIDTHS = (64, 1024, 8192)
"""How many likeliest tokens are looked at for a row with filters, one width after the other while it is open; then the
whole vocabulary."""

MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Filters:
    """Per row: top-k (the vocabulary's size when off), top-p, min-p as [R] tensors."""

    limits: Tensor
    shares: Tensor
    floors: Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw], vocabulary: int, device: torch.device) -> _Filters:
        limits = torch.tensor([draw.top_k or vocabulary for draw in draws], device=device).clamp(max=vocabulary)
        shares = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=device)
        return cls(limits, shares, torch.tensor([draw.min_p for draw in draws], dtype=torch.float32, device=device))

    def of_rows(self, rows: Tensor) -> _Filters:
        return _Filters(self.limits[rows], self.shares[rows], self.floors[rows])


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[int, ...]:
    """One token id per row of `logits` (fp32 [S, vocab]). Greedy takes the lowest id among equals."""
    vocabulary = logits.shape[1]
    kinds: dict[str, list[int]] = {}
    for row, draw in enumerate(draws):
        kinds.setdefault(kind_of(draw, vocabulary), []).append(row)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    for kind, rows in kinds.items():
        whole = len(rows) == len(draws)
        part = logits if whole else logits[rows]
        if kind == "greedy":
            found = part.argmax(-1)
        else:
            found = _draw(part, [draws[row] for row in rows], filtered=kind == "filtered")
        if whole:
            tokens = found
        else:
            tokens[rows] = found
    return tuple(tokens.tolist())


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits, a hash of (seed, position): two rounds of SplitMix64 (Steele 2014)."""
    state = _mix((seed & MASK) ^ 0x9E3779B97F4A7C15)
    return (_mix((state + (position + 1) * 0x9E3779B97F4A7C15) & MASK) >> 32) / 4294967296.0


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def kind_of(draw: Draw, vocabulary: int) -> str:
    # The likeliest token has at least 1 / vocabulary: a smaller top_p is always satisfied by it alone.
    if draw.temperature < _GREEDY_BELOW or draw.top_k == 1 or draw.top_p * vocabulary <= 1 or draw.min_p >= 1:
        return "greedy"
    return "filtered" if draw.top_k > 0 or draw.top_p < 1 or draw.min_p > 0 else "plain"


def _draw(logits: Tensor, draws: Sequence[Draw], *, filtered: bool) -> Tensor:
    """Tokens int64 [R] of rows that are not greedy."""
    heat = torch.tensor([draw.temperature for draw in draws], dtype=torch.float32, device=logits.device)[:, None]
    # Subtract before dividing: a small temperature must not overflow to inf - inf.
    weights = (logits - logits.amax(-1, keepdim=True)).div_(heat).exp_()
    points = [uniform(draw.seed, draw.position) for draw in draws]
    places = torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None]
    if not filtered:
        return _pick(weights, places)
    return _pick_filtered(weights, places, _Filters.of(draws, logits.shape[1], logits.device))


def _pick(weights: Tensor, places: Tensor) -> Tensor:
    """The first column of each row where the running sum passes `places` [R, 1] of the whole."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, places * sums[:, -1:], right=True).squeeze(1)


def _pick_filtered(weights: Tensor, places: Tensor, filters: _Filters) -> Tensor:
    """Like `_pick` among the tokens that the filters keep; wider looks only at rows that a narrow one leaves open."""
    vocabulary = weights.shape[1]
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    totals = weights.sum(-1, dtype=torch.float64)
    rows = torch.arange(len(weights), device=weights.device)
    for width in _WIDTHS:
        if width >= vocabulary or not len(rows):
            break
        head, ids = (weights if len(rows) == len(weights) else weights[rows]).topk(width)
        cuts, known = _cuts(head, vocabulary, totals[rows], filters.of_rows(rows))
        ids, order = ids.sort(-1)
        kept = head.masked_fill_(head < cuts[:, None], 0.0)
        found = ids.gather(1, _pick(kept.gather(1, order), places[rows])[:, None]).squeeze(1)
        # Tokens tied with the cut may lie beyond the head.
        done = known & (kept[:, -1] == 0)
        tokens[rows[done]] = found[done]
        rows = rows[~done]
    if len(rows):
        part = weights[rows]
        cuts, _ = _cuts(part.sort(-1, descending=True).values, vocabulary, totals[rows], filters.of_rows(rows))
        tokens[rows] = _pick(part.masked_fill_(part < cuts[:, None], 0.0), places[rows])
    return tokens


def _cuts(head: Tensor, vocabulary: int, totals: Tensor, filters: _Filters) -> tuple[Tensor, Tensor]:
    """Least weight [R] that the filters let through, from the largest weights of each row, descending [R, H], and
    whether they were enough to know it. Weights are unnormalised, the largest is 1."""
    width = head.shape[1]
    sums = head.cumsum(-1, dtype=torch.float64)
    inside = filters.limits <= width
    last_kept = (filters.limits.clamp(max=width) - 1)[:, None]
    # top-p shares out what top-k leaves: the whole row when it is off.
    base = torch.where(inside, sums.gather(1, last_kept).squeeze(1), totals)
    # The token that crosses the share is kept: count the sums still below it.
    crossing = (sums < (filters.shares * base)[:, None]).sum(-1, keepdim=True)
    cuts = head.gather(1, torch.minimum(crossing, last_kept)).squeeze(1)
    off = filters.limits >= vocabulary
    everything = off & (filters.shares >= 1)
    cuts[everything] = 0.0
    known = inside | everything | (off & (crossing.squeeze(1) < width))
    return torch.maximum(cuts, filters.floors), known
