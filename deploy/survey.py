"""Gathers what `tidegate doctor` looks at: the machine, the installed packages, what is on Ray; and removes orphans.

A shell around `deploy.doctor` and `deploy.inventory`: it decides nothing. Ray is loaded only where one may run.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from deploy import doctor
from deploy.catalog import folder_here
from deploy.cluster import Note, abandoned, connect_ray, notes
from deploy.config import ClusterConfig, Environment
from deploy.doctor import Finding, Need, Verdict
from deploy.files import file_faults
from deploy.house import strangers
from deploy.inventory import Coordinator, Inventory, Orphan, Place, Rank
from deploy.machine import physical_cores, port_fault
from deploy.settings import native_folder
from deploy.staging import ModelError
from workers.memory import machine_bytes
from workers.native.build import NativeUnavailable, built
from workers.native.pairs import parts_for
from workers.native.processor import Processor

_ANSWER_S = 10.0
_NAMES = ("tidegate", "ray", "torch")
"""Packages that must be the same on all nodes."""


def examine(config: ClusterConfig, address: str | None, *, fix: bool) -> list[Finding]:
    """Everything, with `config` as what is to run here. `address`: the Ray to look at, else that of a service on this
    machine, else whichever Ray itself finds. `fix`: remove what nobody owns."""
    environment = Environment.read()
    known = notes(environment.cache / "run")
    found = _packages()
    findings = doctor.check_versions(requires("tidegate") or (), found, platform.python_version(), strangers())
    findings += _machine(config, environment, known)
    findings += _leftovers(known, fix=fix)
    with _ray(address, known) as (link, why):
        if link is None:
            return [*findings, *doctor.check_orphans(None, why)]
        return [*findings, *look_at_ray(link, fix=fix)]


def _machine(config: ClusterConfig, environment: Environment, known: Sequence[Note]) -> list[Finding]:
    """What the config asks of this machine."""
    served = [note.url for note in known if note.is_live]
    findings = [doctor.check_port(config.host, config.port, port_fault(config.host, config.port), served)]
    findings += [
        Finding("config", Verdict.FAIL, fault, "name a file that can be read")
        for fault in file_faults(config, environment)
    ]
    if config.device == "cuda":
        return findings
    cores = physical_cores()
    needs = list(_needs(config, environment, cores))
    findings += doctor.check_memory(needs, machine_bytes(), _available())
    findings.append(doctor.check_threads(sum(need.threads * need.ranks for need in needs), cores, "config"))
    return [*findings, _kernels(config, environment)]


def _kernels(config: ClusterConfig, environment: Environment) -> Finding:
    """Compiles the native kernels, if they are not there yet: the only way to know that they can be."""
    names = {section.kernels for section in config.sections}
    processor = Processor.read()
    fault, variant = None, processor.variants[0]
    if any(name.startswith(("auto", "native")) for name in names):
        try:
            for part in (None, *(part for section in config.sections for part in parts_for(section.kv_precision))):
                built(native_folder(environment.cache), variant, part)
        except NativeUnavailable as error:
            fault = str(error)
    return doctor.check_kernels(names, processor.name, variant.name, fault)


def _needs(config: ClusterConfig, environment: Environment, cores: int) -> Iterator[Need]:
    for section in config.sections:
        folder = None
        with suppress(ModelError):  # what cannot be meant is for `serve` to refuse
            folder = folder_here(section.model, environment)
        files = list(folder.glob("*.safetensors")) if folder else []
        yield Need(
            model=section.names[0],
            ranks=section.model_ranks,
            tensor_parallel_size=section.tensor_parallel_size,
            threads=section.threads or max(1, cores // config.ranks),
            weights=sum(path.stat().st_size for path in files) if files else None,
            pool=section.kv_memory,
            share=config.cpu_memory_utilization * section.model_ranks / config.ranks,
        )


def _packages() -> dict[str, str | None]:
    """The version of each package that we ask for."""
    found: dict[str, str | None] = {}
    for text in requires("tidegate") or ():
        with suppress(InvalidRequirement):
            found[Requirement(text).name] = None
    for name in (*found, *_NAMES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that are to be had now."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return machine_bytes()


def _leftovers(known: Sequence[Note], *, fix: bool) -> list[Finding]:
    dead = [note.path for note in known if not note.is_live]
    folders = abandoned()
    if fix:
        for path in dead:
            path.unlink(missing_ok=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        count = len(dead) + len(folders)
        return [Finding("leftovers", Verdict.OK, f"{count} removed")] if count else []
    return doctor.check_leftovers(map(str, dead), map(str, folders))


@contextmanager
def _ray(address: str | None, known: Sequence[Note]) -> Iterator[tuple[str | None, str]]:
    """Connected to a Ray: (its address, ""), or (None, why there is none)."""
    live = next((note for note in known if note.is_live), None)
    token = live.link.token if live and not address else None
    try:
        link = connect_ray(address or (live.link.address if live else "auto"), token)
    except ConnectionError as error:
        yield None, f"no Ray at {address}: {error}" if address else "no Ray runs here"
        return
    import ray

    try:
        yield link.address, ""
    finally:
        ray.shutdown()


def look_at_ray(address: str, *, fix: bool) -> list[Finding]:
    """What is on the Ray that this process is connected to."""
    statuses = _statuses()
    found = _inventory(address, statuses)
    findings = doctor.check_orphans(found)
    if fix:
        findings = [_fixed(finding) if finding.orphan else finding for finding in findings]
    for service, status in statuses.items():
        if status and (status["groups"] or service in found.applications):
            findings += [*doctor.check_groups(status), *doctor.check_computing(status)]
    cores = _node_cores()
    for status in statuses.values():
        for node, threads in doctor.threads_by_node(status or {}).items():
            if node in cores:
                findings.append(doctor.check_threads(threads, cores[node], f"node {node}"))
    return [*findings, *doctor.check_nodes(_node_versions())]


def _statuses() -> dict[str, dict[str, Any] | None]:
    """The status of each service's coordinator; None for one that does not answer."""
    import ray
    from ray.exceptions import RayError

    from cluster.registry import CoordinatorMissing, coordinator_services, find_coordinator

    found: dict[str, dict[str, Any] | None] = {}
    for service in coordinator_services():
        found[service] = None
        with suppress(CoordinatorMissing, RayError, TimeoutError):
            status = ray.get(find_coordinator(service).status.remote(), timeout=_ANSWER_S)
            found[service] = {"service": service, **status}
    return found


def _inventory(address: str, statuses: dict[str, dict[str, Any] | None]) -> Inventory:
    import ray
    from ray import serve
    from ray.util import list_named_actors, placement_group_table

    from cluster.registry import NAMESPACE, coordinator_name

    ours = {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE}
    actors = ray._private.state.actors(actor_state_name="ALIVE").values()
    ages = {actor["Name"]: max(0.0, time.time() - actor["StartTime"] / 1000) for actor in actors}
    running = _serve_runs()
    applications = serve.status().applications if running else {}
    return Inventory(
        address=address,
        coordinators=tuple(
            Coordinator(name, ages.get(coordinator_name(name), 0.0), len(status["groups"]) if status else None)
            for name, status in statuses.items()
        ),
        ranks=tuple(Rank(name, ages.get(name, 0.0)) for name in sorted(ours) if "-rank" in name),
        places=tuple(
            Place(key, place["name"]) for key, place in placement_group_table().items() if place["state"] != "REMOVED"
        ),
        replicas=frozenset(name for name in ages if name.startswith("SERVE_REPLICA::")),
        applications={name: tuple(facts.deployments) for name, facts in applications.items()},
    )


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _fixed(finding: Finding) -> Finding:
    assert finding.orphan is not None
    _remove(finding.orphan)
    return Finding(finding.topic, Verdict.OK, f"removed: {finding.text}")


def _remove(orphan: Orphan) -> None:
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    from cluster.registry import NAMESPACE, end_coordinator

    match orphan.kind:
        case "coordinator":
            end_coordinator(orphan.key)
        case "rank":
            with suppress(ValueError):  # it has gone by itself
                ray.kill(ray.get_actor(orphan.key, NAMESPACE))
        case "place":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(orphan.key))))


def _node_cores() -> dict[str, int]:
    """CPUs of each node as Ray was told, by address."""
    import ray

    return {
        str(node["NodeManagerAddress"]): int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]
    }


def _node_versions() -> dict[str, dict[str, str]]:
    """What is installed on each node; one that does not answer in time is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_versions)
            asked[task.remote()] = str(node["NodeManagerAddress"])
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    return {asked[call]: ray.get(call) for call in done}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
