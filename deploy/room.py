"""Whether all groups of all models find a place on the cluster's nodes, and if not, why. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.bundles import Resources, shortage, take, total


@dataclass(frozen=True, slots=True)
class Demand:
    """`groups` groups of `model`. Each takes `bundles`, whole on one node unless it may go `across` several."""

    bundles: tuple[Resources, ...]
    groups: int
    model: str
    across: bool = False


def lack(demands: Sequence[Demand], nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """Why not all of `demands` fit on `nodes` (name -> resources) at once; None when they do. Big groups go first."""
    left = {name: dict(resources) for name, resources in nodes.items()}
    for demand in sorted(demands, key=lambda demand: -sum(total(demand.bundles).values())):
        if short := shortage(demand.bundles, demand.groups, left, across=demand.across):
            return f"{demand.model}: {short}" if len(demands) > 1 else short
        for _ in range(demand.groups):
            take(demand.bundles, left, across=demand.across)
    return None


def cores_of_ranks(own: int, here: Mapping[str, float], nodes: Mapping[str, Mapping[str, float]]) -> int:
    """The cores of a node on which ranks compute. `own` are those of the machine that asks, whose node has the
    resources `here`: the answer, unless that node takes no work (a head that only controls); then those of the largest
    of `nodes` that does."""
    elsewhere = max((int(resources.get("CPU", 0.0)) for resources in nodes.values()), default=0)
    return elsewhere if elsewhere and here.get("CPU", 0.0) < 1.0 else own
