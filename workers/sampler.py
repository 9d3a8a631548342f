"""sample: logits and draws to tokens. A row's token depends on its own logits, its seed and its position only.

Order of the filters: temperature, top-k, top-p (of what top-k left), min-p (relative to the likeliest token). Each
keeps the tokens at or above a probability, so tokens tied at a cut all stay. The token is found by inverse CDF in
vocabulary order: tiny differences in logits move a boundary a little instead of reordering the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.plan import Draw

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits 1e-4 apart already differ by e^10 there."""

_HEAD = 1024
"""Candidates looked at first for top-k and top-p; a full sort is needed only when they do not settle it."""

_MASK = (1 << 64) - 1


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[int, ...]:
    """One token id per row of `logits` (fp32 [S, vocab]). Greedy takes the lowest id among equals."""
    vocabulary = logits.shape[1]
    tokens = logits.argmax(-1)
    random = [row for row, draw in enumerate(draws) if not _is_greedy(draw, vocabulary)]
    if random:
        rows = torch.tensor(random, device=logits.device)
        chosen = [draws[row] for row in random]
        tokens[rows] = _draw(logits if len(random) == len(draws) else logits[rows], chosen)
    return tuple(tokens.tolist())


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits, a hash of (seed, position): two rounds of SplitMix64 (Steele 2014)."""
    state = _mix((seed & _MASK) ^ 0x9E3779B97F4A7C15)
    return (_mix((state + (position + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 32) / 4294967296.0


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_greedy(draw: Draw, vocabulary: int) -> bool:
    # The likeliest token has at least 1 / vocabulary: a smaller top_p is always satisfied by it alone.
    return draw.temperature < _GREEDY_BELOW or draw.top_k == 1 or draw.top_p * vocabulary <= 1 or draw.min_p >= 1


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens int64 [R] of rows that are not greedy."""
    device = logits.device
    heat = torch.tensor([draw.temperature for draw in draws], dtype=torch.float32, device=device)[:, None]
    # Subtract before dividing: a small temperature must not overflow to inf - inf.
    weights = ((logits - logits.amax(-1, keepdim=True)) / heat).exp_()
    floors = torch.tensor([draw.min_p for draw in draws], dtype=torch.float32, device=device)[:, None]
    if any(draw.top_k > 0 or draw.top_p < 1 for draw in draws):
        floors = torch.maximum(floors, _cuts(weights, draws))
    if bool((floors > 0).any()):
        weights = weights.masked_fill_(weights < floors, 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    targets = [uniform(draw.seed, draw.position) for draw in draws]
    points = torch.tensor(targets, dtype=torch.float64, device=device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True).squeeze(1)


def _cuts(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Per row the least weight that top-k and top-p let through, fp32 [R, 1]. `weights` are unnormalised."""
    vocabulary = weights.shape[1]
    limits = torch.tensor([draw.top_k or vocabulary for draw in draws], device=weights.device).clamp(max=vocabulary)
    shares = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=weights.device)
    totals = weights.sum(-1, dtype=torch.float64)
    head = weights.topk(min(_HEAD, vocabulary)).values
    cuts, known = _cuts_within(head, vocabulary, totals, limits, shares)
    unsettled = (~known).nonzero().squeeze(1)
    if len(unsettled):
        whole = weights[unsettled].sort(-1, descending=True).values
        parts = (totals[unsettled], limits[unsettled], shares[unsettled])
        cuts[unsettled] = _cuts_within(whole, vocabulary, *parts)[0]
    return cuts


def _cuts_within(
    head: Tensor, vocabulary: int, totals: Tensor, limits: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Cuts [R, 1] from the largest weights of each row, descending [R, H], and whether they were enough to know."""
    width = head.shape[1]
    sums = head.cumsum(-1, dtype=torch.float64)
    inside = limits <= width
    last_kept = (limits.clamp(max=width) - 1)[:, None]
    # top-p shares out what top-k leaves: the whole row when it is off.
    base = torch.where(inside, sums.gather(1, last_kept).squeeze(1), totals)
    # The token that crosses the share is kept: count the sums still below it.
    crossing = (sums < (shares * base)[:, None]).sum(-1, keepdim=True)
    cuts = head.gather(1, torch.minimum(crossing, last_kept))
    off = limits >= vocabulary
    everything = off & (shares >= 1)
    cuts[everything] = 0.0
    return cuts, inside | everything | (off & (crossing.squeeze(1) < width))
