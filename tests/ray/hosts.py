"""Hosts on one machine, each with a network, process numbers and a Ray node of its own, and a link between two of them
that can be cut."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from tests.ray.stage import eventually

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
GCS_PORT = 6379
_NETWORK = "10.231.97"
_TOKEN = secrets.token_hex(32)
_NEW_NET = 0x40000000
_END_S = 10.0
_STARTED = "Ray runtime started"


def obstacle() -> str:
    """Why there can be no hosts here; empty where there can be."""
    if os.getuid():
        return "networks of their own take root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(tool)]:
        return f"not installed: {', '.join(missing)}"
    name = f"td-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        tried = subprocess.run(
            ["ip", "netns", "exec", name, *_APART, "true"], capture_output=True, text=True, timeout=30
        )
    except subprocess.CalledProcessError as error:
        return f"no network of one's own here: {error.stderr.strip()}"
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", name)
    return tried.stderr.strip() if tried.returncode else ""


_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Host:
    """One machine, as far as its processes can tell. `boot` starts its Ray node; `kill` pulls the plug, after which it
    may be booted again."""

    def __init__(self, name: str, address: str, temporary: Path) -> None:
        self.name = name
        self.address = address
        self._temporary = temporary
        self._log = temporary.parent / f"{name}.log"
        self._node: subprocess.Popen[bytes] | None = None
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def boot(self, cpus: int, head: Host | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Its Ray node, the head's unless there is a `head` to join. Returns once the node has its processes."""
        join = [f"--address={head.address}:{GCS_PORT}"] if head else ["--head", f"--port={GCS_PORT}"]
        more = [] if head else ["--include-dashboard=false", f"--temp-dir={self._temporary}"]
        command = [
            *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.name, *_APART),
            *(str(TOOLS / "ray"), "start", "--block", *join, *more, f"--node-ip-address={self.address}"),
            *(f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats"),
        ]
        told = {**_clean(), **(environment or {})}
        with self._log.open("wb") as log:
            self._node = subprocess.Popen(command, env=told, stdout=log, stderr=log, cwd=ROOT)
        eventually(self._is_booted)

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Another process on it, with pipes to its input and output."""
        (init,) = self.processes()[:1]
        enter = ["nsenter", f"--target={init.pid}", "--pid", "--net", "--mount"]
        return subprocess.Popen(
            [*enter, f"--wd={ROOT}", *words],
            env={**_clean(), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def clients(self, most: int) -> ThreadPoolExecutor:
        """Threads whose sockets are on this host."""
        return ThreadPoolExecutor(most, initializer=self._enter_network)

    def processes(self) -> list[psutil.Process]:
        """Those of its Ray node, the first first."""
        assert self._node is not None
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._node.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """End all of its processes at once, without a word to anybody."""
        if self._node is None:
            return
        left = self.processes()
        self._node.kill()
        self._node.wait(_END_S)
        _, alive = psutil.wait_procs(left, timeout=_END_S)
        assert not alive
        self._node = None

    def remove(self) -> None:
        """Leave nothing of it."""
        self.kill()
        _ip("netns", "delete", self.name)

    def _is_booted(self) -> bool:
        said = self._log.read_text(errors="replace")
        assert self._node is not None and self._node.poll() is None, said
        return _STARTED in said

    def _enter_network(self) -> None:
        with open(f"/run/netns/{self.name}", "rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network of {self.name}")


class Pair:
    """Two hosts with a cable between them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="th-", dir="/tmp"))
        stem = f"td{os.getpid()}"
        self.first = Host(f"{stem}a", f"{_NETWORK}.1", self.folder / "r")
        self.second = Host(f"{stem}b", f"{_NETWORK}.2", self.folder / "r")
        ends = [(self.first, f"{stem}x"), (self.second, f"{stem}y")]
        self._end = ends[0][1]
        one, other = (("name", end, "netns", host.name) for host, end in ends)
        _ip("link", "add", *one, "type", "veth", "peer", *other)
        for host, end in ends:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.name, "link", "set", end, "up")

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("-n", self.first.name, "link", "set", self._end, "down")

    def mend(self) -> None:
        """It passes again."""
        _ip("-n", self.first.name, "link", "set", self._end, "up")

    def remove(self) -> None:
        """Both hosts, and what they have written."""
        for host in (self.first, self.second):
            host.remove()
        shutil.rmtree(self.folder, ignore_errors=True)


def _clean() -> dict[str, str]:
    """The environment of a machine that knows nothing of any other Ray; our code is the one of this checkout, and the
    token is in the environment, as an operator of Kubernetes puts it there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TIDEGATE_"))}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    return {**kept, **auth, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
