"""All wiring: from a config to a Serve application, and from there to a running service on this machine.

`build` is the application builder for `serve deploy` and RayService (`import_path: deploy.app:build`; its `args` are
the keys of ClusterConfig); `run`, `status` and `watching` are what the command line does.
"""

# No `from __future__ import annotations` here: Serve looks at the builder's annotation, and must find the class itself.

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from cluster.actors import open_coordinator
from cluster.bundles import group_bundles
from cluster.coordination.cards import PROTOCOL
from cluster.coordination.control import Revise
from cluster.group import GroupOwner
from cluster.ingress import Ingress
from cluster.legacy import edition_of
from cluster.registry import CoordinatorMissing, coordinator_services, find_coordinator
from deploy.catalog import fingerprint, resolve
from deploy.cluster import Note, RayLink, connect_ray, recall, start_ray
from deploy.config import ClusterConfig, ConfigError, Environment, is_loopback
from deploy.continuity import continued
from deploy.description import described
from deploy.files import file_faults
from deploy.house import tidegate_version
from deploy.machine import physical_cores, port_fault
from deploy.quality.gate import admitted
from deploy.room import Demand, cores_of_ranks
from deploy.sections import ModelSection
from deploy.service import Plan, Service, ServiceError
from deploy.settings import coordinator_settings, group_settings, ingress_settings, native_folder
from kvstore.layout import Precision
from kvstore.precisions import PrecisionError
from workers.models.generic.spec import GenericSpec
from workers.native.build import NativeUnavailable, Part, built
from workers.native.pairs import parts_for
from workers.native.processor import Processor

Progress = Callable[[str], None]
Look = Callable[[], dict[str, Any]]

SETTLING_S = 20.0
"""What a replica gets to stop beyond the time that running answers get to end."""
EVERY_REQUEST = 1_000_000
"""More requests than one ingress replica will ever see at once: Serve must not queue before us."""
_ANSWER_S = 30.0

log = logging.getLogger(__name__)


def build(args: ClusterConfig) -> serve.Application:
    """The application of `args`; fetches the models first. Every node must see their folders under the same paths. What
    a KV precision costs is not measured here: what this machine knows of it counts.

    Raises ConfigError where Serve's own proxy would let anybody in from elsewhere."""
    if not args.api_keys_file and not is_loopback(host := _proxy_host()):
        raise ConfigError(
            f"Serve listens on {host}, and without keys everybody who reaches it could use the service: set "
            "api_keys_file, or http_options.host: 127.0.0.1"
        )
    folders = folders_of(args, log.info)
    config = admitted(args, folders, log.info, run=None)
    plan = make_plan(config, *folders, asked=args)
    if identity := continued(plan.coordinator, args):
        plan = make_plan(config, *folders, identity=identity, asked=args)
    coordinator = open_coordinator(plan.coordinator, replace=True)
    ray.get(coordinator.carry_out.remote(Revise(edition_of(plan.coordinator))), timeout=_ANSWER_S)
    return plan.application


def folders_of(config: ClusterConfig, on_progress: Progress) -> list[Path]:
    """The folder of each model, fetched where need be. Raises ModelError."""
    return [resolve(section.model, section.revision, on_progress) for section in config.sections]


def run(
    config: ClusterConfig, folders: Sequence[Path], on_progress: Progress, *, address: str | None = None
) -> Service:
    """Bring `config`, whose models lie in `folders`, up on a Ray of our own on this machine (or on the one at
    `address`) and wait until it answers.

    `on_progress` gets "stage" or "stage: detail". Raises ConfigError when it cannot start as asked, ServiceError when
    it did not come up; nothing is left running then. The caller closes the service.
    """
    check(config, folders)
    _compile_ahead(config)
    asked, config = config, admitted(config, folders, on_progress)
    on_progress("starting Ray")
    haproxy = config.proxy == "auto"
    link = connect_ray(address) if address else start_ray(run_dir() / "token", haproxy=haproxy)
    service = Service(link, config.service_name, run_dir())
    try:
        service.start(make_plan(config, *folders, asked=asked), on_progress)
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
    with watching(address, service=service) as look:
        return look()


@contextmanager
def watching(address: str | None = None, *, service: str | None = None, url: str | None = None) -> Iterator[Look]:
    """A function that gives the `status` of now, as often as it is called, over one connection. It raises ServiceError
    while the coordinator does not answer. `url`: of the service on this machine that answers there."""
    link, service, url = located(address, service, url)

    def look() -> dict[str, Any]:
        names = [service] if service else coordinator_services()
        if not names:
            raise ServiceError(f"no service runs on the Ray at {link.address}")
        try:
            found = ray.get(find_coordinator(names[0]).status.remote(), timeout=_ANSWER_S)
        except (CoordinatorMissing, RayError, TimeoutError) as error:
            raise ServiceError(f"the coordinator of {names[0]} does not answer: {error}") from error
        return {"service": names[0], "url": url, "services": names, **found}

    try:
        yield look
    finally:
        ray.shutdown()


def located(
    address: str | None, service: str | None = None, url: str | None = None
) -> tuple[RayLink, str | None, str | None]:
    """Connected to the Ray at `address`, else to that of a service on this machine: the link, the service's name and
    its URL, as far as they are known. Raises ServiceError when none is found."""
    if address:
        return connect_ray(address), service, url
    note = _noted(service, url)
    return connect_ray(note.link.address, note.link.token), note.service, note.url


def _noted(service: str | None, url: str | None) -> Note:
    note = recall(run_dir(), service, url)
    if note is None:
        at = f" at {url}" if url else ""
        raise ServiceError(
            f"no service runs{at} on this machine; start one with `tidegate serve`, or name a Ray's address"
        )
    return note


def make_plan(
    config: ClusterConfig, *folders: Path, identity: str | None = None, asked: ClusterConfig | None = None
) -> Plan:
    """What to start for `config`, whose models lie in `folders`; `identity` is that of the deployment that it updates
    (None: it is a new one), `asked` what the operator wrote, where `config` is what came of it. Needs a connection to
    Ray: what `device: auto` means depends on its nodes."""
    device = config.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    cores, environment = _cores(), Environment.read()
    revisions = [fingerprint(folder) for folder in folders]
    facts = (PROTOCOL, tidegate_version(), revisions, config.model_dump_json())
    identity = identity or hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    front = ingress_settings(config, folders, revisions, environment)
    coordinator = coordinator_settings(asked or config, identity, front, tidegate_version())
    owners, demands = [], []
    for name, section, folder, revision in zip(
        deployment_names(config.sections), config.sections, folders, revisions, strict=True
    ):
        settings = group_settings(
            config, section, folder, revision, device=device, cores=cores, environment=environment
        )
        memory = _rank_memory(section, folder) if device == "cpu" else 0
        bundles = group_bundles(
            section.tensor_parallel_size, device=device, cores=cores, all_ranks=config.most_ranks, memory=memory
        )
        demand = Demand(tuple(bundles), section.groups, section.names[0], across=section.placement == "nodes")
        owners.append(_owners(name, config, demand).bind(settings, coordinator, bundles, config.drain_s))
        demands.append(demand)
    return Plan(
        application=_ingresses(config).bind(front, coordinator, tidegate_version(), owners),
        coordinator=coordinator,
        host=config.host,
        port=config.port,
        demands=tuple(demands),
        drain_s=config.drain_s + SETTLING_S,
        surges=config.update == "surge",
    )


def deployment_names(sections: Sequence[ModelSection]) -> list[str]:
    """A name for each model's deployment: "group" for the only one, else with number and model."""
    if len(sections) == 1:
        return ["group"]
    words = (re.sub(r"[^A-Za-z0-9]+", "-", section.names[0]).strip("-") for section in sections)
    return [f"group-{number}-{word}" for number, word in enumerate(words, 1)]


def check(config: ClusterConfig, folders: Sequence[Path]) -> None:
    """What can be known to fail before anything is started. Raises ConfigError."""
    if fault := port_fault(config.host, config.port):
        raise ConfigError(fault)
    if faults := file_faults(config, Environment.read()):
        raise ConfigError("\n".join(faults))
    for section, folder in zip(config.sections, folders, strict=True):
        try:
            spec = described(folder)
            spec.shards(section.tensor_parallel_size)
            if isinstance(spec, GenericSpec):
                spec.check_weights(section.weight_precision)
            spec.layout(section.block_size, section.kv_precision.settle(Precision.BF16), 1)
        except PrecisionError as error:
            key = ".".join(part for part in ("kv_precision", error.key) if part)
            raise ConfigError(f"{key}: {error.message}, as {section.model} is built") from error
        except ValueError as error:
            raise ConfigError(f"{section.model} cannot be served: {error}") from error


def run_dir() -> Path:
    """Where services that run on this machine leave a note."""
    return Environment.read().cache / "run"


def _compile_ahead(config: ClusterConfig) -> None:
    """Begin to compile the native kernels that this machine's ranks will look for, while Ray starts; whoever comes
    first waits for it. What goes wrong is for the ranks to say."""
    if config.device == "cuda" or all(section.kernels in ("onednn", "torch") for section in config.sections):
        return

    def build(part: Part | None) -> None:
        with suppress(NativeUnavailable):
            built(native_folder(Environment.read().cache), Processor.read().variants[0], part)

    for part in (None, *dict.fromkeys(part for section in config.sections for part in parts_for(section.kv_precision))):
        threading.Thread(target=build, args=(part,), name="compile", daemon=True).start()


def _owners(name: str, config: ClusterConfig, demand: Demand) -> Any:
    return serve.deployment(
        GroupOwner,
        name=name,
        num_replicas=demand.groups,
        ray_actor_options=_replica_options(demand.bundles[0]["CPU"]),
        placement_group_bundles=list(demand.bundles),
        placement_group_strategy="PACK" if demand.across else "STRICT_PACK",
        graceful_shutdown_timeout_s=config.drain_s + SETTLING_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_surge_percent=max(1, 100 // demand.groups) if config.update == "surge" else 0,
        rolling_update_percentage=min(1.0, 1.0 / demand.groups),
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
        max_surge_percent=100,  # an ingress takes no room; while none is there, whoever comes would be turned away
        graceful_shutdown_timeout_s=config.drain_s + SETTLING_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
    )


def _replica_options(cpus: float) -> dict[str, Any]:
    return {"num_cpus": cpus}


def _cores() -> int:
    """Physical cores that the ranks of a node share."""
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    here = nodes.get(ray.get_runtime_context().get_node_id(), {})
    return cores_of_ranks(physical_cores(), here, nodes)


def _rank_memory(section: ModelSection, folder: Path) -> int:
    """Bytes that one CPU rank asks Ray for: its share of the weights and its pool, where the pool's size is given."""
    if section.kv_memory is None:
        return 0
    return section.kv_memory + weight_bytes(folder) // section.tensor_parallel_size


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights in `folder`."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _proxy_host() -> str:
    """The address that Serve's proxies of this Ray cluster listen on."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    return str(ray.get(controller.get_http_config.remote(), timeout=_ANSWER_S).host)
