"""Search: the most compact KV precision by layer that still passes. It measures nothing: whoever calls it does.

Rungs lead from the most compact precision up to the unquantised one. The first rung that passes on all layers is the
top; below it each layer is measured alone, all others unquantised. From all layers on the lowest rung they are raised
one at a time, always the one that gains most per byte, until all stand on the top rung; the shortest such way that
passes is found by halving. So a model of L layers and R rungs below the top takes L · R short measurements and about
log2(L · R) whole ones. That divergences of layers add up, and fall along the way, is an approximation: the map that
comes out was itself measured and passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from deploy.quality.figures import Cost, Limits
from kvstore.precisions import LayerRange, PrecisionMap, Words

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measures:
    """What a search asks for: what a map costs on the whole text; the KL of one on a short piece of it; its bytes per
    token. The unquantised map costs nothing and is never asked for."""

    cost: Callable[[PrecisionMap], Cost]
    short_kl: Callable[[PrecisionMap], float]
    token_bytes: Callable[[PrecisionMap], int]


@dataclass(frozen=True, slots=True)
class Found:
    """`precision` is the most compact map that passes within the budget, with what it costs (None: it is the
    unquantised one). Where `faults` are, none does, and it is the least harmful that fits. `tried` counts measurements
    of the whole text, `probed` those of single layers."""

    precision: PrecisionMap
    cost: Cost | None
    faults: tuple[str, ...]
    token_bytes: int
    tried: int
    probed: int


def search(
    layers: int, rungs: Sequence[Words], measures: Measures, limits: Limits, say: Say, *, budget: int | None = None
) -> Found:
    """The map for `layers` layers out of `rungs`, the most compact first, the unquantised one last. `budget` is in
    bytes per token over all layers."""
    climb = _Climb(layers, rungs, measures, limits, say)
    top = climb.top()
    way = climb.way(top)
    fits = [step for step in way if budget is None or measures.token_bytes(climb.map(step)) <= budget]
    if not fits:
        least = climb.map(way[0])
        size = measures.token_bytes(least)
        fault = f"even {least.spelled(layers)} takes {size:,} bytes per token, and the budget is {budget:,}"
        return climb.found(least, (fault,))
    low, high = -1, len(fits) - 1
    if len(fits) < len(way) and climb.faults(fits[high]):
        return climb.found(climb.map(fits[high]), climb.faults(fits[high]))
    while high - low > 1:  # fits[high] passes, fits[low] does not
        middle = (low + high) // 2
        low, high = (middle, high) if climb.faults(fits[middle]) else (low, middle)
    return climb.found(climb.map(fits[high]), ())


def mapped(words: Sequence[Words]) -> PrecisionMap:
    """One precision per layer as a map: what most layers have is the default, the rest stands in ranges."""
    default = Counter(words).most_common(1)[0][0]
    ranges, at = [], 0
    for each, run in groupby(words):
        first, at = at, at + len(list(run))
        if each != default:
            text = str(first) if at - first == 1 else f"{first}-{at - 1}"
            ranges.append((LayerRange(first, at - 1, text), each))
    return PrecisionMap(default, tuple(ranges))


Step = tuple[int, ...]
"""The rung of each layer."""


class _Climb:
    """What has been measured so far, none of it twice."""

    def __init__(self, layers: int, rungs: Sequence[Words], measures: Measures, limits: Limits, say: Say) -> None:
        self._layers = layers
        self._rungs = tuple(rungs)
        self._measures = measures
        self._limits = limits
        self._say = say
        self._costs: dict[Step, Cost] = {}
        self._probed = 0

    def map(self, step: Step) -> PrecisionMap:
        return mapped([self._rungs[rung] for rung in step])

    def faults(self, step: Step) -> tuple[str, ...]:
        """Why `step` does not pass; empty when it does."""
        if set(step) == {len(self._rungs) - 1}:
            return ()
        if step not in self._costs:
            self._say(
                f"searching: map {len(self._costs) + 1}, {self._measures.token_bytes(self.map(step)):,} bytes per token"
            )
            self._costs[step] = self._measures.cost(self.map(step))
        return tuple(self._limits.faults(self._costs[step]))

    def top(self) -> int:
        """The lowest rung that passes on all layers."""
        return next(rung for rung in range(len(self._rungs)) if not self.faults((rung,) * self._layers))

    def way(self, top: int) -> list[Step]:
        """From all layers on rung 0 to all on `top`, one layer one rung higher from each to the next."""
        harm = [
            [self._harm(layer, rung) if rung < top else 0.0 for rung in range(top + 1)] for layer in range(self._layers)
        ]
        sizes = [self._measures.token_bytes(self.map((rung,) * self._layers)) for rung in range(top + 1)]
        step = (0,) * self._layers
        found = [step]
        while any(rung < top for rung in step):

            def gain(layer: int, at: Step = step) -> float:
                rung = at[layer]
                return (harm[layer][rung] - harm[layer][rung + 1]) / max(1, sizes[rung + 1] - sizes[rung])

            best = max((layer for layer in range(self._layers) if step[layer] < top), key=gain)
            step = (*step[:best], step[best] + 1, *step[best + 1 :])
            found.append(step)
        return found

    def found(self, precision: PrecisionMap, faults: tuple[str, ...]) -> Found:
        cost = next((cost for step, cost in self._costs.items() if self.map(step) == precision), None)
        size = self._measures.token_bytes(precision)
        return Found(precision, cost, faults, size, len(self._costs), self._probed)

    def _harm(self, layer: int, rung: int) -> float:
        """KL with only this layer on `rung`."""
        self._say(f"searching: layer {layer} of {self._layers} alone in {self._rungs[rung].stored.label}")
        self._probed += 1
        last = len(self._rungs) - 1
        return self._measures.short_kl(self.map(tuple(rung if at == layer else last for at in range(self._layers))))
