"""Embedding: tokens to the residual stream, on one rank of several. It knows no checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from workers.parallel import Communicator


class Embedding:
    """`table` holds the rows of tokens [start, stop) of `vocabulary`, `positions` a vector for each position or None.
    `scale` multiplies the table's vectors, rounded to their dtype first, as the models were trained; `divisor` then
    divides them, as it is."""

    def __init__(
        self,
        table: Tensor,
        vocabulary: tuple[int, int],
        comm: Communicator,
        *,
        scale: float = 1.0,
        divisor: float = 1.0,
        positions: Tensor | None = None,
    ) -> None:
        self._table = table
        self._start, self._stop = vocabulary
        self._comm = comm
        self._scale = float(torch.tensor(scale, dtype=table.dtype)) / divisor
        self._positions = positions

    def into(self, stream: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """`stream` [T, hidden], filled with the embeddings of `tokens` at `positions`, both int64 [T]."""
        stream.copy_(self._rows(tokens))
        if self._scale != 1.0:
            stream.mul_(self._scale)
        if self._positions is not None:
            stream.add_(embedding(positions, self._positions))
        return stream

    def _rows(self, tokens: Tensor) -> Tensor:
        if self._comm.world == 1:
            return embedding(tokens, self._table)
        mine = (tokens >= self._start) & (tokens < self._stop)
        rows = embedding(torch.where(mine, tokens - self._start, 0), self._table).float()
        return self._comm.all_reduce(rows.masked_fill_(~mine[:, None], 0.0))
