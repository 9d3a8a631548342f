"""`tidegate doctor`: what is wrong, or will be, and what to do about it. Pure checks over facts that `deploy.survey`
gathers; each gives findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from rich.table import Table
from rich.text import Text

from deploy.inventory import Inventory, Orphan, headless, orphans
from deploy.sizes import format_size
from deploy.tables import plain_table

PROCESS_BYTES = 500 * 2**20
"""What a rank's process takes beside weights and pool, on a CPU: an estimate."""
_TIGHT = 0.9


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `todo` says what to do, `orphan` is what --fix would remove."""

    topic: str
    verdict: Verdict
    text: str
    todo: str = ""
    orphan: Orphan | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What one model of the config takes: `weights` in bytes (None: not on this machine yet), `pool` bytes per rank
    (None: what is left), `share` of the machine's memory that its ranks may have in all."""

    model: str
    ranks: int
    tensor_parallel_size: int
    threads: int
    weights: int | None
    pool: int | None
    share: float


def check_orphans(found: Inventory | None, why: str = "") -> list[Finding]:
    """What is left on the Ray cluster; `found` None: there is none, because of `why`."""
    topic = "Ray"
    if found is None:
        return [Finding(topic, Verdict.OK, why or "no Ray runs here")]
    findings = []
    for orphan in orphans(found):
        verdict = Verdict.FAIL if orphan.removable else Verdict.WARN
        todo = "tidegate doctor --fix removes it" if orphan.removable else "look again in two minutes"
        findings.append(Finding("orphans", verdict, orphan.text, todo, orphan if orphan.removable else None))
    for name in headless(found):
        text = f"application {name} has no coordinator: it can take no request"
        findings.append(Finding("orphans", Verdict.FAIL, text, f"deploy it again, or `serve.delete({name!r})`"))
    if not findings:
        services = ", ".join(sorted(found.services)) or "no service"
        findings.append(Finding(topic, Verdict.OK, f"{found.address}: {services}, no orphans"))
    return findings


def check_groups(status: Mapping[str, Any]) -> list[Finding]:
    """A running service's groups: which of them are not up."""
    service, findings = status.get("service", ""), []
    for row in status.get("groups", ()):
        if row["state"] != "up":
            text = f"{service}: group {row['group']} is {row['state']}, last report {row['reported_s']:.0f} s ago"
            findings.append(Finding("groups", Verdict.WARN, text, "its owner replaces it; see Ray's logs"))
    up = len(status.get("groups", ())) - len(findings)
    text = f"{service}: {up} of {len(status.get('groups', ()))} groups up"
    return findings or [Finding("groups", Verdict.OK if up else Verdict.WARN, text)]


def check_computing(status: Mapping[str, Any]) -> list[Finding]:
    """What the ranks of a running service compute with, and why."""
    service, ranks = status.get("service", ""), [rank for row in status.get("groups", ()) for rank in row["ranks"]]
    kinds = dict.fromkeys((rank["kernel"], rank["kernel_why"]) for rank in ranks)
    return [Finding("kernels", Verdict.OK, f"{service} computes with {kernel}: {why}") for kernel, why in kinds]


def threads_by_node(status: Mapping[str, Any]) -> dict[str, int]:
    """Threads of all ranks, by node."""
    nodes: dict[str, int] = {}
    for row in status.get("groups", ()):
        for rank in row["ranks"]:
            if rank["device"] == "cpu":
                nodes[str(rank["node"])] = nodes.get(str(rank["node"]), 0) + rank["threads"]
    return nodes


def check_port(host: str, port: int, fault: str | None, served: Iterable[str]) -> Finding:
    """Whether the service can listen where the config says; `served` are URLs of services that run here."""
    if fault is None:
        return Finding("port", Verdict.OK, f"{host}:{port} is free")
    if any(url.endswith(f":{port}") for url in served):
        return Finding("port", Verdict.OK, f"{host}:{port}: our own service answers there")
    return Finding("port", Verdict.FAIL, fault, "set port, or end what listens there")


def check_memory(needs: Sequence[Need], machine: int, available: int) -> list[Finding]:
    """Weights, pools and processes of all ranks against the machine's (or cgroup's) memory. CPU only."""
    findings, total = [], 0
    for need in needs:
        if need.weights is None:
            text = f"{need.model} is not on this machine yet: its weights are not counted"
            findings.append(Finding("memory", Verdict.WARN, text, "python -m deploy.catalog MODEL fetches it"))
        weights = (need.weights or 0) * (need.ranks // need.tensor_parallel_size)
        fixed = weights + need.ranks * PROCESS_BYTES
        if need.pool is not None:
            total += fixed + need.pool * need.ranks
            continue
        budget = int(need.share * machine)
        total += max(budget, fixed)
        if fixed >= budget:
            text = f"{need.model}: weights and processes take {format_size(fixed)} of the {format_size(budget)} it may"
            findings.append(Finding("memory", Verdict.FAIL, text, "raise cpu_memory_utilization, or set kv_memory"))
    text = f"{format_size(total)} of {format_size(machine)} wanted, {format_size(available)} available now"
    if total > machine:
        findings.append(Finding("memory", Verdict.FAIL, text, "lower kv_memory, groups or the model's size"))
    elif total > _TIGHT * machine or total > available:
        findings.append(Finding("memory", Verdict.WARN, text, "lower kv_memory, or end other programs"))
    else:
        findings.append(Finding("memory", Verdict.OK, text))
    return findings


def check_threads(threads: int, cores: int, where: str) -> Finding:
    """`threads` of all ranks against the physical `cores` of a node: ranks that wait for a core hold up all others."""
    text = f"{where}: {threads} threads of ranks on {cores} physical cores"
    if threads > cores:
        return Finding("threads", Verdict.WARN, text, "set threads, or fewer groups or ranks: they wait for each other")
    return Finding("threads", Verdict.OK, text)


def check_kernels(names: Iterable[str], cpu: str, variant: str, fault: str | None) -> Finding:
    """What would compute on this machine's `cpu`: `names` are the config's `kernels`, `variant` the fastest build of
    the native ones ("plain": the CPU has no vector unit that they are made for), `fault` why it cannot be had."""
    wanted = set(names)
    forced = sorted(name for name in wanted if name.startswith("native"))
    topic, native = "kernels", f"native-{variant}"
    if wanted <= {"onednn", "torch"}:
        return Finding(topic, Verdict.OK, f"{', '.join(sorted(wanted))}, as configured")
    if fault is None and (variant != "plain" or forced):
        return Finding(topic, Verdict.OK, f"{', '.join(forced) or native} for {cpu}; oneDNN for weights not in bf16")
    if fault is None:
        return Finding(topic, Verdict.OK, f"oneDNN: {cpu} has neither AVX512 nor AVX2")
    verdict = Verdict.FAIL if forced else Verdict.WARN
    text = f"native kernels cannot be had: {fault}" + ("" if forced else "; oneDNN computes, more slowly")
    return Finding(topic, verdict, text, "install g++ 10 or later, then look again")


def check_versions(
    requirements: Iterable[str], installed: Mapping[str, str | None], python: str, strangers: Iterable[str]
) -> list[Finding]:
    """What is installed against what this distribution asks for, and whose packages are imported."""
    findings = [
        Finding("versions", Verdict.FAIL, line, "run in an environment of its own, or from its own folder")
        for line in strangers
    ]
    if tuple(map(int, python.split(".")[:2])) < (3, 11):
        findings.append(Finding("versions", Verdict.FAIL, f"Python {python}", "Python 3.11 or later is needed"))
    for requirement in _parsed(requirements):
        version = installed.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            text = f"{requirement.name} {version or 'is missing'}, wanted {requirement.specifier or 'any'}"
            findings.append(Finding("versions", Verdict.FAIL, text, f"pip install '{requirement}'"))
    known = ", ".join(f"{name} {installed[name]}" for name in ("ray", "torch") if installed.get(name))
    return findings or [Finding("versions", Verdict.OK, f"Python {python}, {known}")]


def check_nodes(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """What each node of the cluster has (node -> name -> version): all must have the same."""
    findings = []
    for name in sorted({name for found in versions.values() for name in found}):
        nodes: dict[str, list[str]] = {}
        for node, found in versions.items():
            nodes.setdefault(found.get(name, "missing"), []).append(node)
        if len(nodes) > 1:
            text = f"{name} differs between nodes: " + "; ".join(f"{v} on {', '.join(on)}" for v, on in nodes.items())
            findings.append(Finding("versions", Verdict.FAIL, text, "use one image for all nodes"))
    return findings or [Finding("versions", Verdict.OK, f"the same on {len(versions)} nodes")]


def check_leftovers(notes: Iterable[str], folders: Iterable[str]) -> list[Finding]:
    """Files that launchers left which were killed."""
    text = "left by a service that was killed: "
    todo = "tidegate doctor --fix removes it"
    return [Finding("leftovers", Verdict.WARN, text + name, todo) for name in (*notes, *folders)]


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.verdict is not Verdict.FAIL for finding in findings)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Worst last, so that it is what one sees at the end."""
    table = plain_table("Doctor", "", "about", "found", "what to do")
    for column in table.columns:
        column.justify = "left"
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    for finding in sorted(findings, key=lambda finding: list(Verdict).index(finding.verdict)):
        verdict = Text(finding.verdict.value, style=colours[finding.verdict])
        table.add_row(verdict, finding.topic, Text(finding.text), Text(finding.todo))
    return table


def _parsed(requirements: Iterable[str]) -> list[Requirement]:
    """Those that hold here and are not an extra's."""
    found = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # none that a program could check
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found
