"""Discovery: where the service of a Ray cluster answers, for a job that runs on it; and what it has to compute with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ANSWER_S = 30.0
ANYWHERE = ("0.0.0.0", "::")


class NoService(Exception):
    """There is none, or it cannot be reached from here."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """`units` cores or GPUs, by `name`."""

    units: int
    name: str


def address(host: str, port: int, proxies: Iterable[str], own: str) -> str:
    """The URL of Serve's HTTP server that listens on `host`: `proxies` are the addresses of the nodes with a proxy,
    `own` that of this one, which goes first. Raises NoService when it cannot be reached from this node."""
    nodes = list(proxies)
    if not nodes:
        raise NoService("Serve runs on this Ray, but without an HTTP proxy; pass --url")
    if host in ANYWHERE:
        host = own if own in nodes else nodes[0]
    elif (host == "localhost" or host.startswith("127.") or host == "::1") and own not in nodes:
        raise NoService(
            f"the service listens on {host} of another node ({', '.join(nodes)}): let it listen on 0.0.0.0 "
            "(http_options.host, with api_keys_file), run the job on that node, or pass --url"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def found(ray_address: str | None) -> tuple[str, Capacity | None]:
    """(URL, capacity) of the service on the Ray at `ray_address`; None: the one that Ray itself finds, which is a job's
    own. Raises NoService."""
    import ray

    began = not ray.is_initialized()
    try:
        if began:
            ray.init(address=ray_address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        raise NoService(f"no Ray can be reached: {error}; pass --url") from error
    try:
        return _looked_up()
    finally:
        if began:
            ray.shutdown()


def _looked_up() -> tuple[str, Capacity | None]:
    import ray

    from cluster.registry import coordinator_services

    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError as error:
        raise NoService("no service runs on this Ray (Serve is not started); pass --url") from error
    options = ray.get(controller.get_http_config.remote(), timeout=_ANSWER_S)
    with_proxy = set(ray.get(controller.get_proxies.remote(), timeout=_ANSWER_S))
    nodes = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    own = nodes.get(ray.get_runtime_context().get_node_id(), "")
    url = address(str(options.host), int(options.port), [at for id, at in nodes.items() if id in with_proxy], own)
    names = coordinator_services()
    if not names:
        raise NoService("Serve runs on this Ray, but no Tidegate; pass --url")
    return url, _capacity_of(names[0])


def capacity_at(ray_address: str, token: str | None) -> Capacity | None:
    """The same of the service on a Ray of this machine; None where it cannot be learnt."""
    from cluster.registry import coordinator_services
    from deploy.cluster import connect_ray, stop_ray

    try:
        link = connect_ray(ray_address, token)
    except (ConnectionError, RuntimeError, OSError):
        return None  # it is said in passing only
    try:
        names = coordinator_services()
        return _capacity_of(names[0]) if names else None
    finally:
        stop_ray(link)


def _capacity_of(service: str) -> Capacity | None:
    """None where the coordinator does not answer: that is no reason to fail."""
    import ray
    from ray.exceptions import RayError

    from cluster.registry import CoordinatorMissing, find_coordinator

    try:
        return capacity(ray.get(find_coordinator(service).status.remote(), timeout=_ANSWER_S))
    except (CoordinatorMissing, RayError, TimeoutError):
        return None


def capacity(status: Mapping[str, Any]) -> Capacity | None:
    """The GPUs, or the threads of CPU ranks, of all groups in a coordinator's status."""
    ranks = [rank for group in status.get("groups", ()) for rank in group.get("ranks", ())]
    gpus = sum(rank.get("device") != "cpu" for rank in ranks)
    if gpus:
        return Capacity(gpus, "GPU")
    threads = sum(int(rank.get("threads") or 0) for rank in ranks)
    return Capacity(threads, "core") if threads else None
