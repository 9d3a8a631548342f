"""Places: whether an output will still be there when a Ray job has ended. Pure.

A job's working folder is Ray's own unpacked copy and is removed at will; any other folder of its node's own disk is
lost with the node, and the next run of the same job, on another node, would not find it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FLEETING = {"tmpfs", "ramfs", "devtmpfs", "overlay", "aufs", "proc", "sysfs", "devpts", "cgroup", "cgroup2", "mqueue"}
"""Kinds of file systems that end with the machine or container they are mounted in."""
INSTEAD = (
    "give an absolute path on a mounted file system that all nodes see, a URL as in s3://bucket/out.jsonl, or "
    "--return, which brings results back through the job's log; --output-is-shared says that the place is shared anyway"
)


def is_url(output: str) -> bool:
    """Whether an output is for fsspec to open."""
    return _URL.match(output) is not None


def fault(output: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """Why `output` is no place for a job's results, None where it is one. `mounts` are (mount point, kind) of the
    node's file systems."""
    if is_url(output):
        local = output.startswith(("file://", "local://", "memory://"))
        return f"--output {output} is on this node alone: {INSTEAD}" if local else None
    if not output.startswith("/"):
        return (
            f"--output {output} is relative, and a job's working folder is Ray's own copy, which is removed: {INSTEAD}"
        )
    point, kind = mount_of(output, mounts)
    if point == "/" or kind in _FLEETING:
        where = "the root file system" if point == "/" else f"{point} ({kind})"
        return f"--output {output} lies on {where} of the node that runs the job: {INSTEAD}"
    return None


def mount_of(path: str, mounts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The mount that an absolute path lies on: the longest mount point above it, the last one mounted there."""
    best = ("/", "")
    whole = os.path.normpath(path)
    for point, kind in mounts:
        inside = whole == point or whole.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best


def mounts_here(file: Path = Path("/proc/self/mounts")) -> list[tuple[str, str]]:
    """The mounts of this machine as the kernel lists them."""
    found = []
    for line in file.read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        found.append((re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point), kind))
    return found


def resolved(output: str) -> str:
    """An absolute path with its symbolic links followed, as far as it exists: what it lies on is what counts."""
    return os.path.realpath(output) if output.startswith("/") else output
