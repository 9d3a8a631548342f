"""What a step has to compute and to read, whatever computes it: operations and bytes, from a plan and a model's shape.

Counted is what no implementation can do without: each weight read once per step, each key and value of a row's context
once, two operations per multiply-add. Activations, norms and sampling are left out; they stay in caches. One rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import KVLayout
from workers.models.spec import ModelSpec
from workers.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Work:
    """`linear` operations of the linears, those of logits too, `other` ones of attention, `moved` bytes."""

    linear: float
    other: float
    moved: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's steps are made of: `layer_weights` of all layers' linears and `head_weights` of the logits' one,
    in elements, and what each takes in bytes; `pair_operations` of attention per token and token of its context;
    `token_bytes` of KV per token."""

    layer_weights: int
    head_weights: int
    layer_bytes: float
    head_bytes: float
    pair_operations: int
    token_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, layout: KVLayout, *, item: float) -> Shape:
        """Of a whole model on one rank; `item` is the bytes of a weight. Raises ValueError for a model with experts or
        MLA, whose steps are made of other things."""
        if spec.experts or spec.latent:
            raise ValueError(f"a roofline of {spec.architecture} cannot be drawn: it has experts or MLA")
        wide = spec.head_dim * (2 * spec.q_heads + 2 * spec.kv_heads)
        layers = spec.layers * spec.hidden_size * (wide + (2 + spec.gated) * spec.intermediate_size)
        head = spec.vocab_size * spec.hidden_size
        pairs = 4 * spec.layers * spec.q_heads * spec.head_dim
        return cls(layers, head, layers * item, head * item, pairs, layout.token_bytes)

    def work(self, plan: StepPlan) -> Work:
        """A plan's rows; what it copies and zeroes is left out."""
        drawn = sum(row.draw is not None for row in plan.rows)
        pairs = sum(_pairs(row.start, len(row.tokens)) for row in plan.rows)
        kept = sum(row.start + 2 * len(row.tokens) for row in plan.rows)  # read once, and written where new
        return Work(
            linear=2.0 * (self.layer_weights * plan.tokens + self.head_weights * drawn),
            other=float(self.pair_operations * pairs),
            moved=self.layer_bytes + (self.head_bytes if drawn else 0.0) + float(self.token_bytes * kept),
        )


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine does at most: operations per second in the linears' own format and in that of everything else,
    bytes read per second."""

    linear: float
    other: float
    read: float

    def seconds(self, work: Work) -> float:
        """The least that `work` takes: computing and reading at the same time, each at its peak."""
        return max(work.linear / self.linear + work.other / self.other, work.moved / self.read)


def _pairs(start: int, count: int) -> int:
    """Each of `count` tokens from position `start` on sees itself and all before it."""
    return count * start + count * (count + 1) // 2
