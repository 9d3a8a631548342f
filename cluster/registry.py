"""Where the coordinators of services are: named actors of one namespace on a Ray cluster. Knows none of
their methods."""

from __future__ import annotations

import ray
from ray.actor import ActorHandle

from cluster.legacy import forget

NAMESPACE = "tidegate"
"""Ray's namespace of all our named actors."""


class CoordinatorMissing(RuntimeError):
    """There is no coordinator of that service."""


def coordinator_name(service: str) -> str:
    """The actor's name in NAMESPACE."""
    return f"tidegate-coordinator-{service}"


def find_coordinator(service: str) -> ActorHandle:
    """The coordinator of `service`, whatever its config. Blocks for a call to Ray. Raises CoordinatorMissing."""
    try:
        return ray.get_actor(coordinator_name(service), NAMESPACE)
    except ValueError:
        raise CoordinatorMissing(f"no service called {service} runs on this Ray cluster") from None


def coordinator_services() -> list[str]:
    """The services that have a coordinator on this Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    prefix = coordinator_name("")
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def end_coordinator(service: str) -> None:
    """End the coordinator of `service`, if there is one, and what it would leave to another."""
    forget(service)
    try:
        ray.kill(find_coordinator(service))
    except CoordinatorMissing:
        return
