"""All wiring: from a config to a Serve application, and from there to a running service on this machine.

`build` is the application builder for `serve deploy` and RayService (`import_path: deploy.app:build`; its `args` are
the keys of ClusterConfig); `run` and `status` are what the command line does.
"""

# No `from __future__ import annotations` here: Serve looks at the builder's annotation, and must find the class itself.

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cluster.actors import coordinator_services, find_coordinator, open_coordinator
from cluster.bundles import Resources, group_bundles
from cluster.coordination.cards import PROTOCOL
from cluster.group import GroupOwner
from cluster.ingress import Ingress
from deploy.catalog import fingerprint, resolve
from deploy.cluster import RayLink, connect_ray, recall, start_ray
from deploy.config import ClusterConfig, ConfigError, Environment
from deploy.house import tidegate_version
from deploy.machine import physical_cores, port_fault
from deploy.service import Plan, Service, ServiceError
from workers.models.spec import ModelSpec

Progress = Callable[[str], None]

SETTLING_S = 20.0
"""What a replica gets to stop beyond the time that running answers get to end."""
EVERY_REQUEST = 1_000_000
"""More requests than one ingress replica will ever see at once: Serve must not queue before us."""

log = logging.getLogger(__name__)


def build(args: ClusterConfig) -> serve.Application:
    """The application of `args`; fetches the model first. Every node must see its folder under the same path."""
    plan = make_plan(args, resolve(args.model, args.revision, log.info))
    open_coordinator(args.service_name, plan.identity, replace=True)
    return plan.application


def run(config: ClusterConfig, model: Path, on_progress: Progress, *, address: str | None = None) -> Service:
    """Bring `config` up on a Ray of our own on this machine (or on the one at `address`) and wait until it answers.

    `on_progress` gets "stage" or "stage: detail". Raises ConfigError when it cannot start as asked, ServiceError when
    it did not come up; nothing is left running then. The caller closes the service.
    """
    _check(config, model)
    on_progress("starting Ray")
    link = connect_ray(address) if address else start_ray(_run_dir() / "token")
    service = Service(link, config.service_name, _run_dir())
    try:
        service.start(make_plan(config, model), on_progress)
    except (ServiceError, RayError) as error:
        logs = service.abandon(keep_logs=True)
        raise ServiceError(f"{error}\nRay's logs are kept in {logs}" if logs else str(error)) from error
    except BaseException:
        service.abandon()
        raise
    return service


def status(address: str | None = None, *, service: str | None = None) -> dict[str, Any]:
    """What the coordinator of `service` (None: the only one) knows, as plain JSON values, and where it listens.

    Looks on the Ray at `address`, else for a service that runs on this machine. Raises ServiceError when none is found.
    """
    link, url = _reach(address, service)
    try:
        names = [service] if service else coordinator_services()
        if not names:
            raise ServiceError(f"no service runs on the Ray at {link.address}")
        found: dict[str, Any] = ray.get(find_coordinator(names[0]).status.remote(), timeout=30)
    finally:
        ray.shutdown()
    return {"service": names[0], "url": url, "services": names, **found}


def _reach(address: str | None, service: str | None) -> tuple[RayLink, str | None]:
    if address:
        return connect_ray(address), None
    note = recall(_run_dir(), service)
    if note is None:
        raise ServiceError("no service runs on this machine; start one with `tidegate serve`, or name a Ray's address")
    return connect_ray(note.link.address, note.link.token), note.url


def make_plan(config: ClusterConfig, folder: Path) -> Plan:
    """What to start for `config`. Needs a connection to Ray: what `device: auto` means depends on its nodes."""
    device = config.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    cores = physical_cores()
    revision = fingerprint(folder)
    facts = (PROTOCOL, tidegate_version(), revision, config.model_dump_json())
    identity = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    memory = _rank_memory(config, folder) if device == "cpu" else 0
    bundles = group_bundles(
        config.tensor_parallel_size, device=device, cores=cores, all_ranks=config.ranks, memory=memory
    )
    settings = config.group_settings(folder, revision, device=device, cores=cores)
    group = _owners(config, bundles).bind(settings, config.service_name, identity, bundles, config.drain_s)
    front = config.ingress_settings(folder, revision, Environment.read())
    return Plan(
        application=_ingresses(config).bind(front, identity, tidegate_version(), group),
        identity=identity,
        host=config.host,
        port=config.port,
        groups=config.groups,
        bundles=tuple(bundles),
        drain_s=config.drain_s + SETTLING_S,
    )


def _check(config: ClusterConfig, model: Path) -> None:
    """What can be known to fail before anything is started."""
    if fault := port_fault(config.host, config.port):
        raise ConfigError(fault)
    try:
        ModelSpec.read(model).shards(config.tensor_parallel_size)
    except ValueError as error:
        raise ConfigError(f"{config.model} cannot be served: {error}") from error


def _owners(config: ClusterConfig, bundles: Sequence[Resources]) -> Any:
    return serve.deployment(
        GroupOwner,
        name="group",
        num_replicas=config.groups,
        ray_actor_options=_replica_options(bundles[0]["CPU"]),
        placement_group_bundles=list(bundles),
        placement_group_strategy="STRICT_PACK",
        graceful_shutdown_timeout_s=config.drain_s + SETTLING_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        max_constructor_retry_count=2,
    )


def _ingresses(config: ClusterConfig) -> Any:
    return serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=config.ingress_replicas,
        ray_actor_options=_replica_options(0.01),
        max_ongoing_requests=EVERY_REQUEST,
        graceful_shutdown_timeout_s=config.drain_s + SETTLING_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
    )


def _replica_options(cpus: float) -> dict[str, Any]:
    return {"num_cpus": cpus}


def _rank_memory(config: ClusterConfig, folder: Path) -> int:
    """Bytes that one CPU rank asks Ray for: its share of the weights and its pool, where the pool's size is given."""
    if config.kv_memory is None:
        return 0
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return config.kv_memory + weights // config.tensor_parallel_size


def _run_dir() -> Path:
    return Environment.read().cache / "run"
