"""AttentionBackend: what a model needs of an attention kernel over the paged pool. It knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.batch import Batch
from workers.models.shapes import LatentShape


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """What makes keys and values out of MLA's latents (arXiv 2405.04434 section 2.1): of head h, `keys[h]` @ latent is
    the part of a key that is not rotated, `values[h]` @ latent the value. [q_heads of this rank, elements, rank of the
    latent], in the dtype of heads. `shape` has the sizes."""

    shape: LatentShape
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How the queries of one layer look at keys. Scores are `scale` * q·k; with `softcap` they become
    softcap * tanh(score / softcap) before anything is masked (Gemma 2, arXiv 2408.00118). With `window` a query at
    position p sees positions (p - window, p] only. `sinks`, fp32 [q_heads of this rank], joins the denominator of the
    softmax with one more score per query head, which belongs to no value (arXiv 2309.17453). With an `expansion` the
    layer has MLA."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    expansion: Expansion | None = None


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the pool and attends over each row's own slots.

    A backend reads no slot at or past a row's length into a sum: such a slot may hold anything, NaN included.
    """

    name: str

    def prepare(self, batch: Batch) -> object:
        """What all layers of one step share (indices, masks)."""
        ...

    def attend(self, layer: int, heads: Tensor, turns: Tensor | None, step: object) -> Tensor:
        """Rotate queries and keys, store keys and values, attend: [T, q_heads * head_dim] in heads' dtype.

        `heads` [T, (q_heads + 2 * kv_heads) * head_dim] holds queries, keys and values side by side and is used up;
        query head i reads KV head i // (q_heads / kv_heads). `turns` complex64 [T, 1, head_dim / 2] rotates queries and
        keys, whose pairs lie next to each other (None: as they are). Causal: a token sees its row's positions up to its
        own. What comes back holds until the next call.

        Under a rule with an expansion, `heads` holds each head's query, its rotated part last, then one latent and one
        rotated key for all of them; turns are for the rotated parts; and what comes back are heads of the size of
        values.
        """
        ...
