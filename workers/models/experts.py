"""Mixture: a layer's experts in the place of its MLP. It keeps no sequence state.

A router scores the experts, each token goes through a few of them, and their outputs are added up by weight. Tokens are
gathered expert by expert, one product each; a token's sum runs over its experts in the order of their numbers, whatever
else is in the step. Every rank holds its share of every expert's columns and the whole router; what the ranks' shares
give is summed once per layer, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.shards import split_evenly
from workers.kernels import Activation, Kernels, Linear
from workers.models.shapes import ExpertShape, Routing, Scoring
from workers.models.tensors import Tensors
from workers.parallel import Communicator


@dataclass(frozen=True, slots=True)
class Expert:
    """`gate_up` gives what lies inside, `down` brings it back, in fp32."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] → fp32 [n, hidden], until the next expert is called."""
        return self.down(self.gate_up(x))


class Router:
    """Chooses by `routing`; `logits` gives fp32 [T, experts], `bias` fp32 [experts] corrects what is chosen."""

    def __init__(self, logits: Linear, routing: Routing, bias: Tensor | None) -> None:
        self._logits = logits
        self._routing = routing
        self._bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] → weights fp32 and experts int64, both [T, chosen]."""
        return route(self._logits(x), self._routing, self._bias)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of logits fp32 [T, experts], weights fp32 and experts int64, both [T, chosen]."""
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    worth = scores if bias is None else scores + bias
    if routing.groups > 1:
        worth = _of_open_groups(worth, routing)
    chosen = worth.topk(routing.chosen, -1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, chosen


def _of_open_groups(worth: Tensor, routing: Routing) -> Tensor:
    """`worth` [T, experts], -inf outside of each token's best groups."""
    grouped = worth.unflatten(-1, (routing.groups, -1))
    rank = grouped.topk(min(routing.deciding, grouped.shape[-1]), -1).values.sum(-1)
    best = rank.topk(routing.open_groups, -1).indices
    closed = torch.ones_like(rank, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)


class Mixture:
    """An Adding: `combine` adds to the stream what all ranks together give, fp32 [T, hidden]."""

    def __init__(
        self,
        router: Router,
        experts: list[Expert],
        shared: Expert | None,
        combine: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._combine = combine

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """See workers.kernels.Adding."""
        weights, chosen = self._router(x)
        total = torch.zeros(stream.shape, device=x.device) if self._shared is None else self._shared(x)
        each = chosen.shape[1]
        # Stable, so that an expert gets its tokens in their own order.
        order = chosen.flatten().argsort(stable=True)
        tokens, weights = order // each, weights.flatten()[order, None]
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                given = expert(x.index_select(0, tokens[part]))
                total.index_add_(0, tokens[part], given * weights[part])
                first += count
        return self._combine(total, stream)


@dataclass(frozen=True, slots=True)
class ExpertLoader:
    """Reads mixtures of `shape` over a stream of `hidden`. Checkpoints have a tensor per expert and part, or, saved by
    newer versions of transformers, one for all experts' gates and ups and one for their downs."""

    shape: ExpertShape
    hidden: int
    activation: Activation
    tensors: Tensors
    kernels: Kernels
    comm: Communicator

    def mixture(self, layer: str) -> Mixture:
        """That of the layer whose tensors' names begin with `layer`."""
        shape = self.shape
        prefixes = [layer + prefix for prefix in shape.prefixes]
        prefix = next((one for one in prefixes if f"{one}gate.weight" in self.tensors), prefixes[0])
        router = self.kernels.router(self.tensors.weight(f"{prefix}gate", (shape.experts, self.hidden)))
        bias = None
        if shape.routing.corrected:
            bias = self.tensors.vector(f"{prefix}gate.e_score_correction_bias", (shape.experts,)).float()
        experts = [self._expert(prefix, index) for index in range(shape.experts)]
        return Mixture(Router(router, shape.routing, bias), experts, self._shared(prefix), self._combine)

    def _expert(self, prefix: str, index: int) -> Expert:
        """This rank's columns of expert `index`."""
        size, each = self.shape.columns, f"{prefix}experts.{index}."
        start, stop = columns = split_evenly(size, self.comm.world)[self.comm.rank]
        fused = f"{prefix}experts.gate_up_proj"
        if fused not in self.tensors:
            return self._separate([each + part for part in self.shape.parts], size, columns, slot="given")
        both, last = (self.shape.experts, 2 * size, self.hidden), (self.shape.experts, self.hidden, size)
        gate = self.tensors.matrix(fused, both, index, rows=columns)
        up = self.tensors.matrix(fused, both, index, rows=(size + start, size + stop))
        return self._of(
            gate, up, self.tensors.matrix(f"{prefix}experts.down_proj", last, index, columns=columns), "given"
        )

    def _shared(self, prefix: str) -> Expert | None:
        """Experts that every token takes are as one."""
        size = self.shape.shared
        if not size:
            return None
        names = [f"{prefix}shared_experts.{part}" for part in self.shape.parts]
        return self._separate(names, size, split_evenly(size, self.comm.world)[self.comm.rank], slot="shared")

    def _separate(self, names: list[str], size: int, columns: tuple[int, int], *, slot: str) -> Expert:
        gate, up = (self.tensors.weight(name, (size, self.hidden), rows=columns) for name in names[:2])
        return self._of(gate, up, self.tensors.weight(names[2], (self.hidden, size), columns=columns), slot)

    def _of(self, gate: Tensor, up: Tensor, down: Tensor, slot: str) -> Expert:
        inner = self.kernels.gated(gate, up, None, self.activation, slot="inner")
        return Expert(inner, self.kernels.linear(down, None, slot=slot, wide=True))

    def _combine(self, part: Tensor, stream: Tensor) -> Tensor:
        return stream.add_(part) if self.comm.world == 1 else self.comm.all_reduce_onto(part, stream)
