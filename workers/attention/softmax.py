"""OnlineSoftmax: attention of some queries over keys and values that come tile by tile, in fp32 and in plain torch.

What it keeps is a running maximum, denominator and weighted sum, so no query's scores ever lie in memory at once (arXiv
1805.02867; as tiles, 2205.14135). It knows no pool and no positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = -3e38
"""Below every score, and no infinity: a tile of which a query sees nothing changes nothing."""


class OnlineSoftmax:
    """`queries` fp32 [n, q, d], multiplied by the scale. `sinks` fp32, of a shape that broadcasts to [n, q, 1]: one
    more score per query, which belongs to no value. Values have `width` elements (None: d)."""

    def __init__(self, queries: Tensor, softcap: float | None, sinks: Tensor | None, width: int | None = None) -> None:
        self._queries = queries
        self._softcap = softcap
        shape = (*queries.shape[:2], 1)
        if sinks is None:
            self._most = queries.new_full(shape, _LEAST)
            self._total = queries.new_zeros(shape)
        else:
            self._most = sinks.expand(shape).clone()
            self._total = queries.new_ones(shape)
        self._sum = queries.new_zeros(*queries.shape[:2], queries.shape[2] if width is None else width)

    def take(self, keys: Tensor, values: Tensor, hidden: Tensor | None) -> None:
        """The next tile: keys fp32 [n, w, d], values fp32 [n, w, width]; `hidden`, bool, broadcasts to [n, q / r, r, w]
        for some r and says what is not seen."""
        scores = self._scores(keys)
        if hidden is not None:
            scores.unflatten(1, (hidden.shape[1], -1)).masked_fill_(hidden, float("-inf"))
        most = torch.maximum(self._most, scores.amax(-1, keepdim=True))
        weights = scores.sub_(most).exp_()
        shrink = self._most.sub_(most).exp_()
        self._total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self._sum.mul_(shrink).baddbmm_(weights, values)
        self._most = most

    def result(self) -> Tensor:
        """[n, q, width]; ends it."""
        return self._sum.div_(self._total)

    def _scores(self, keys: Tensor) -> Tensor:
        return capped(torch.bmm(self._queries, keys.transpose(1, 2)), self._softcap)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap), in place; None: `scores` as they are."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
