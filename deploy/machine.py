"""What this machine offers: physical cores that this process may use, a free port. Knows nothing of Ray or torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def physical_cores(cpus: Iterable[int] | None = None, topology: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Physical cores among the `cpus` this process may run on (default: its affinity), at most its cgroup's CPU quota.

    Two hardware threads of one core count once, since matrix products gain nothing from the second. At least 1.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    cores = {_siblings(topology, cpu) for cpu in allowed}
    quota = _quota(cgroup)
    return max(1, min(len(cores), quota) if quota else len(cores))


def _siblings(topology: Path, cpu: int) -> str:
    """The hardware threads of `cpu`'s core as the kernel lists them: one name per core."""
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(cgroup: Path) -> int | None:
    """Whole CPUs that the cgroup's quota allows; None where there is none."""
    try:
        limit, _, period = (cgroup / "cpu.max").read_text().strip().partition(" ")
        return None if limit == "max" else max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return None


def port_fault(host: str, port: int) -> str | None:
    """Why nothing can listen on host:port, in words; None when something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port"
    return None
