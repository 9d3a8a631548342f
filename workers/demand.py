"""Demand: how many bytes the buffers of one step take on one rank, beside weights and pool.

Arithmetic on a model's sizes and a plan's rows. It follows what the model and the reference attention allocate at a
time, not every temporary; knows no device and allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.models.shapes import LatentShape
from workers.plan import StepPlan

_INDEX = 8
"""Bytes of one index into the pool."""
_FP32 = 4
_SAMPLING = 16
"""Bytes per logit while it is sampled: itself, its exponential, the fp64 running sum."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One rank's share of a model, in elements: `q_heads`, `kv_heads` and `inner` (MLP columns) are those of this
    rank, `vocabulary` is what it sees of the logits (all of it on rank 0). `item` are bytes of an activation,
    `slot` those that a head keeps of a token in the widest layer; `decodes`: they must become fp32 before they are
    of use; `channels`: scales of keys are by channel, two more vectors in fp32. A gather of one-token rows names at
    most `gather_slots` slots (0: attention gathers nothing), one of a longer row `tile`, whose scores are made for
    `block` tokens at a time. `windows` are those of the layer groups. With MLA there is a `latent`; `expert` are this
    rank's columns of one expert, 0 without. Prompts are scored by `slice` tokens at a time."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    item: int
    slot: int
    decodes: bool
    gather_slots: int
    tile: int
    block: int
    windows: tuple[int | None, ...]
    latent: LatentShape | None = None
    expert: int = 0
    slice: int = 0
    channels: bool = False

    def buffers(self, plan: StepPlan) -> tuple[int, ...]:
        """Bytes of the largest buffers that live at the same time, none of them 0; () for a plan without rows."""
        singles = [row.start + 1 for row in plan.rows if len(row.tokens) == 1]
        chunks = [(len(row.tokens), row.start + len(row.tokens)) for row in plan.rows if len(row.tokens) > 1]
        gathered = min(self._seen(singles), self.gather_slots)
        tile = min(max((length for _, length in chunks), default=0), self.tile)
        attention = (
            ()
            if not self.gather_slots
            else (
                self._index_bytes(singles, chunks),
                max(gathered, tile) * self.kv_heads * self._gathered_bytes(),
                self._score_bytes(len(singles), gathered, chunks),
            )
        )
        # The logits come when the layers are done.
        drawn = sum(row.draw is not None for row in plan.rows)
        scored = sum(len(row.score.targets) for row in plan.rows if row.score is not None)
        logits = max(drawn, min(scored, self.slice)) * self.vocabulary * _SAMPLING
        later = (logits,) if logits > sum(attention) else attention
        return tuple(part for part in (plan.tokens * self._token_bytes(), *later) if part)

    def _seen(self, lengths: list[int]) -> int:
        """Slots that rows of such lengths read in the layer group that reads most."""
        return max(sum(min(length, window or length) for length in lengths) for window in self.windows)

    def _token_bytes(self) -> int:
        """The residual stream and its norm with two fp32 copies (one is what ranks add up); and, one after the other,
        queries, keys and values with what attention makes of them, or both halves of the MLP and their product, or what
        all experts together give with what one of them does, should every token come to it."""
        heads = self.item * (self.q_heads + 2 * self.kv_heads) + self._wide(self.item) * self.q_heads
        heads *= self.head_dim
        if kept := self.latent:
            heads = self.item * (self.q_heads * (kept.query + kept.values) + kept.rank + kept.rope)
        experts = (self.item + _FP32) * self.hidden + 3 * self.item * self.expert if self.expert else 0
        return 2 * (self.item + _FP32) * self.hidden + max(heads, 3 * self.item * self.inner, experts)

    def _index_bytes(self, singles: list[int], chunks: list[tuple[int, int]]) -> int:
        """Every row's index into the pool, for each head; all layers of a group share it."""
        slots = 0
        for window in self.windows:
            slots += sum(min(length, window or length) for length in singles)
            slots += sum(min(length, (window or length) + count) for count, length in chunks)
        return slots * self.kv_heads * _INDEX

    def _gathered_bytes(self) -> int:
        """Of one head's slot, as it is stored and in fp32."""
        if self.latent:
            return self.slot + _FP32 * (self.latent.rank + self.latent.rope)
        vectors = 2 * self.decodes + 2 * self.channels
        return self.slot + vectors * _FP32 * self.head_dim

    def _wide(self, item: int) -> int:
        """Bytes of one element as it is, and once more in fp32 where that is another format."""
        return item if item == _FP32 else item + _FP32

    def _score_bytes(self, rows: int, gathered: int, chunks: list[tuple[int, int]]) -> int:
        """Scores and their softmax of the largest gather; or a block's scores over a tile, with the queries and sums of
        its whole row. All in fp32."""
        if self.latent:
            return self._latent_score_bytes(self.latent, rows, gathered, chunks)
        largest = 2 * gathered
        for count, length in chunks:
            largest = max(largest, min(count, self.block) * min(length, self.tile) + 2 * count * self.head_dim)
        return _FP32 * self.q_heads * largest

    def _latent_score_bytes(self, kept: LatentShape, rows: int, gathered: int, chunks: list[tuple[int, int]]) -> int:
        """The same over latents. Absorbed queries, which are as wide as latents, are there twice as they are made, and
        their sums; where latents are expanded, a tile's keys and values of every head are too."""
        copies = 1 if self.item == _FP32 else 2
        absorbed, width = 2 * (kept.rank + kept.rope) + kept.rank, kept.nope + kept.values
        largest = gathered + rows * absorbed
        for count, length in chunks:
            block, tile = min(count, self.block), min(length, self.tile)
            if kept.expands(count):
                each = count * (copies * kept.query + kept.values) + tile * (2 * width + kept.query)
            else:
                each = count * absorbed
            largest = max(largest, block * tile + each)
        return _FP32 * self.q_heads * largest
