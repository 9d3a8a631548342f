"""AttentionBackend: what a model needs of an attention kernel over the paged pool. It knows no kernel."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workers.batch import Batch


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the pool and attends over each row's own slots.

    A backend reads no slot at or past a row's length into a sum: such a slot may hold anything, NaN included.
    """

    name: str

    def prepare(self, batch: Batch) -> object:
        """What all layers of one step share (indices, masks)."""
        ...

    def attend(self, layer: int, query: Tensor, kv: Tensor, step: object) -> Tensor:
        """Store `kv` [T, 2 * kv_heads, head_dim] (keys first) and return [T, q_heads * head_dim] in query's dtype.

        `query` is [T, q_heads, head_dim]; query head i reads KV head i // (q_heads / kv_heads). Causal: a token sees
        its row's positions up to its own.
        """
        ...
