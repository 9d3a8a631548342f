"""What a group asks Ray for, and why it does not get it. Pure arithmetic on resource names and amounts.

A group's bundles: the first for its owner, one more for each rank. CPU shares are fractions, because a rank's threads
are counted by us (`threads`), not by Ray: three ranks must fit on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Resources = dict[str, float]

REPLICA_CPUS = 0.01
"""CPUs that an owner or an ingress asks for: they hardly compute, and should not keep a rank from its place."""
RANKS_SHARE = 0.9
"""The share of a node's cores that all ranks together ask for."""
_UNITS = {"CPU": "CPUs", "GPU": "GPUs", "memory": "GiB of memory"}


def group_bundles(ranks: int, *, device: str, cores: int, all_ranks: int, memory: int = 0) -> list[Resources]:
    """Bundles of one group of `ranks`. `all_ranks` share the `cores` of a node; `memory` is bytes per rank (0: any)."""
    rank: Resources = (
        {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": round(RANKS_SHARE * cores / all_ranks, 4)}
    )
    if memory:
        rank["memory"] = float(memory)
    return [{"CPU": REPLICA_CPUS}, *(dict(rank) for _ in range(ranks))]


def shortage(
    bundles: Sequence[Resources], groups: int, nodes: Mapping[str, Mapping[str, float]], *, across: bool = False
) -> str | None:
    """Why `groups` groups of `bundles` cannot stand on `nodes` (name -> resources), each whole on one of them unless it
    may go `across` several; None when they can. A sentence with what is wanted and what each node has."""
    left = {name: dict(resources) for name, resources in nodes.items()}
    if sum(take(bundles, left, across=across) for _ in range(groups)) == groups:
        return None
    wanted = total(bundles)
    have = (
        "; ".join(f"{name} has {_show(resources, wanted)}" for name, resources in nodes.items()) or "there is no node"
    )
    which = "a group wants" if groups == 1 else f"{groups} groups want each"
    where = f"over several nodes, {_show(bundles[-1], bundles[-1])} for each rank" if across else "on one node"
    return f"{which} {_show(wanted, wanted)} {where}; {have}"


def take(bundles: Sequence[Resources], left: dict[str, dict[str, float]], *, across: bool = False) -> bool:
    """Take one group's resources out of `left` (by node), whole from one node, or bundle by bundle where it may go
    `across` nodes and none holds it whole. False when there is no room; then nothing is taken."""
    wanted = total(bundles)
    if any(_take(wanted, node) for node in left.values()):
        return True
    if not across:
        return False
    trial = {name: dict(resources) for name, resources in left.items()}
    if not all(any(_take(bundle, node) for node in trial.values()) for bundle in bundles):
        return False
    left.update(trial)
    return True


def total(bundles: Sequence[Resources]) -> Resources:
    """All bundles together."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _take(wanted: Resources, node: dict[str, float]) -> bool:
    if any(node.get(name, 0.0) + 1e-6 < amount for name, amount in wanted.items()):
        return False
    for name, amount in wanted.items():
        node[name] -= amount
    return True


def _show(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(_amount(name, resources.get(name, 0.0)) for name in names)


def _amount(name: str, amount: float) -> str:
    number = amount / 2**30 if name == "memory" else amount
    return f"{number:.2f}".rstrip("0").rstrip(".") + f" {_UNITS.get(name, name)}"
