"""What of ours is on a Ray cluster, and which of it nobody owns any more. Pure: values in, values out.

A service is an application of Serve's with an ingress and groups, and a coordinator of its name. Its ranks and places
belong to the replicas of its groups. Only what no living service can own is an orphan; what is too young to tell, or
could belong to a service under another name, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

YOUNG_S = 120.0
"""A service that starts has a coordinator before it has an application: so long nobody is called an orphan."""
REPLICA = "SERVE_REPLICA::"


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The coordinator actor of a service; `groups` that it knows of, None when it does not answer."""

    service: str
    age_s: float
    groups: int | None


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank actor, called SERVICE-REPLICA-SERIAL-rankN."""

    name: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A placement group; Serve names it like the replica that it is for, SERVE_REPLICA::APPLICATION#DEPLOYMENT#ID."""

    id: str
    name: str

    @property
    def parts(self) -> tuple[str, str, str]:
        """(application, deployment, replica); empty for a placement group that is not Serve's."""
        parts = self.name.removeprefix(REPLICA).split("#")
        return (parts[0], parts[1], parts[2]) if self.name.startswith(REPLICA) and len(parts) == 3 else ("", "", "")


@dataclass(frozen=True, slots=True)
class Inventory:
    """`applications`: Serve's, name -> names of deployments. `replicas`: names of living replica actors."""

    address: str
    coordinators: tuple[Coordinator, ...] = ()
    ranks: tuple[Rank, ...] = ()
    places: tuple[Place, ...] = ()
    replicas: frozenset[str] = frozenset()
    applications: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def services(self) -> frozenset[str]:
        """Applications that are ours."""
        return frozenset(
            name for name, parts in self.applications.items() if "ingress" in parts and any(map(is_group, parts))
        )


@dataclass(frozen=True, slots=True)
class Orphan:
    """`kind` is "coordinator", "rank" or "place"; `key` is what removing it takes: an actor's name, a place's id."""

    kind: str
    key: str
    text: str
    removable: bool = True


def is_group(deployment: str) -> bool:
    """Whether a deployment of that name is one of groups."""
    return deployment == "group" or deployment.startswith("group-")


def orphans(found: Inventory) -> Iterator[Orphan]:
    """Everything of ours that nobody owns."""
    yield from _coordinators(found)
    living = {name.removeprefix(REPLICA).rpartition("#")[2] for name in found.replicas}
    for rank in found.ranks:
        if not any(replica and f"-{replica}-" in rank.name for replica in living):
            text = f"rank {rank.name}: the replica that owned it is gone"
            yield Orphan("rank", rank.name, text, rank.age_s >= YOUNG_S)
    for place in found.places:
        application, deployment, _ = place.parts
        if is_group(deployment) and place.name not in found.replicas and application not in found.applications:
            yield Orphan("place", place.id, f"placement group {place.name}: its application is gone")


def _coordinators(found: Inventory) -> Iterator[Orphan]:
    nameless = found.services - {one.service for one in found.coordinators}
    for one in found.coordinators:
        if one.service in found.applications or one.groups:
            continue
        text = f"coordinator of {one.service}: no application of that name, and it knows of no group"
        if one.groups is None:
            text = f"coordinator of {one.service}: no application of that name, and it does not answer"
        if one.age_s < YOUNG_S:
            yield Orphan(
                "coordinator", one.service, f"{text}; it is {one.age_s:.0f} s old, so it may be starting", False
            )
        elif nameless:
            others = ", ".join(sorted(nameless))
            yield Orphan("coordinator", one.service, f"{text}; it may belong to application {others}", False)
        else:
            yield Orphan("coordinator", one.service, text)


def headless(found: Inventory) -> list[str]:
    """Applications of ours that have no coordinator, under their own name or another's."""
    known = {one.service for one in found.coordinators}
    strays = [one for one in found.coordinators if one.service not in found.applications and one.groups]
    missing = sorted(found.services - known)
    return missing if not strays else []
