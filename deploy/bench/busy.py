"""How much CPU time a server's processes have used, by what they call themselves: from Linux's /proc.

A server is a process with all that descend from it or share its session. Knows neither servers nor loads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """`name` as a person would call it, `seconds` of CPU so far."""

    pid: int
    parent: int
    session: int
    name: str
    seconds: float


def family(root: int, proc: Path = _PROC) -> dict[int, Process]:
    """The processes of the server whose first one is `root`, by pid. One that ends meanwhile is left out."""
    every: dict[int, Process] = {}
    for folder in proc.iterdir():
        with suppress(OSError, ValueError, IndexError):
            found = _read(folder)
            every[found.pid] = found
    mine = {pid for pid, process in every.items() if pid == root or process.session == root}
    grown = True
    while grown:
        more = {pid for pid, process in every.items() if process.parent in mine} - mine
        mine |= more
        grown = bool(more)
    return {pid: every[pid] for pid in mine}


def cores(before: Mapping[int, Process], after: Mapping[int, Process], wall_s: float) -> dict[str, float]:
    """Cores that processes of each name kept busy in between, the busiest first; a process that has ended since does
    not count, one that began counts from its start."""
    used: dict[str, float] = {}
    for pid, process in after.items():
        earlier = before.get(pid)
        seconds = process.seconds - (earlier.seconds if earlier else 0.0)
        used[process.name] = used.get(process.name, 0.0) + seconds / wall_s
    return dict(sorted(used.items(), key=lambda item: -item[1]))


def _read(folder: Path) -> Process:
    pid = int(folder.name)
    # The second field, the command in brackets, may hold anything; what comes after it is numbers.
    fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return Process(pid, int(fields[1]), int(fields[3]), _name(words), seconds)


def _name(words: list[str]) -> str:
    """ "ray::Worker.method" without the method, a module or script without its interpreter, else the program."""
    title = words[0].split(" ")[0]
    if "::" in title:
        return title.partition(".")[0].removesuffix(":")
    program = Path(title).name or "(kernel)"
    if not program.startswith("python") or len(words) < 2 or words[1] == "-c":
        return program
    if words[1] == "-m" and len(words) > 2:
        return words[2]
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return Path(script).name or program
