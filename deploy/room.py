"""Whether all groups of all models find a place on the cluster's nodes, and if not, why. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.bundles import Resources, shortage, total


@dataclass(frozen=True, slots=True)
class Demand:
    """`groups` groups of `model`, each of which takes `bundles`, whole on one node."""

    bundles: tuple[Resources, ...]
    groups: int
    model: str


def lack(demands: Sequence[Demand], nodes: Mapping[str, Mapping[str, float]]) -> str | None:
    """Why not all of `demands` fit on `nodes` (name -> resources) at once; None when they do. Big groups go first."""
    left = {name: dict(resources) for name, resources in nodes.items()}
    for demand in sorted(demands, key=lambda demand: -sum(total(demand.bundles).values())):
        if short := shortage(demand.bundles, demand.groups, left):
            return f"{demand.model}: {short}" if len(demands) > 1 else short
        for _ in range(demand.groups):
            _take(demand, left)
    return None


def _take(demand: Demand, left: dict[str, dict[str, float]]) -> None:
    """Take one group's resources from the first node that has them."""
    for resources in left.values():
        if shortage(demand.bundles, 1, {"": resources}) is None:
            for name, amount in total(demand.bundles).items():
                resources[name] = resources.get(name, 0.0) - amount
            return
