"""A Ray of our own on this machine, every socket of it on loopback; or a link to a Ray that runs already.

Knows nothing of what runs on it. Ray binds its servers to all interfaces unless the node's own address is loopback, and
replaces a loopback address that it is given by the machine's outer one, except where it is told that this machine is no
cluster node; so it is told that, in the environment of all its processes. Token authentication is left as Ray has it,
which is on unless RAY_AUTH_MODE says otherwise: without it every user of the machine could run code as this one. The
token is our own, in a file that its owner alone can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.haproxy import WITHOUT, fits, prepare_haproxy

OBJECT_STORE = 100 * 2**20
"""Bytes of Ray's object store: only small values travel here."""
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_RAY_PART = "r"
"""Ray opens its own folder to everybody; so it lies inside one that nobody else may enter."""
_HAPROXY_PART = "h"
_OWNER = "pid"
_SOCKET_PATH = 105
"""Longest path a Unix socket may have, less a little; Ray's own part below its folder takes 65."""
_SOCKET_PART = 65

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
}
"""What every process of our Ray is told: this node's address is 127.0.0.1; tell nobody of it; no ports per replica."""
FAST = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
}
"""Serve's fast path (several times the chunks per second), with its logs kept as they are without it, and a controller
that takes less than half the 4 % of a core it would take for doing nothing."""


@dataclass(frozen=True, slots=True)
class RayLink:
    """A Ray that this process is connected to. `folder` holds its sessions, sockets, logs and token when it is ours,
    and is None when somebody else runs it."""

    address: str
    folder: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Where a service on this machine runs: its Ray, and its URL. `path` is the note's file; `pid` whose it is."""

    service: str
    link: RayLink
    url: str
    path: Path
    pid: int

    @property
    def is_live(self) -> bool:
        """Whether the process that wrote it is there."""
        return _lives(self.pid)


def start_ray(token: Path, *, cpus: int | None = None, haproxy: bool = True) -> RayLink:
    """Start Ray on loopback in a new folder under the system's temporary one, and connect to it (3-6 s).

    `token` is the file with the token of this user's Rays; it is made if need be. `cpus` None: what this process may
    use. `haproxy`: Serve on it puts HAProxy before its ingress, where that runs. Raises RuntimeError when Ray came up
    with another address than loopback.
    """
    home = _short_folder()
    make_token(token)
    proxied = prepare_haproxy(home / _HAPROXY_PART) if haproxy else WITHOUT
    os.environ.update(FAST | proxied | {_TOKEN_PATH: str(token)})
    _stay_on_loopback()
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    try:
        context = ray.init(**_local(home, cpus))
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    facts: dict[str, Any] = context.address_info
    if facts["node_ip_address"] != "127.0.0.1":
        ray.shutdown()
        raise RuntimeError(f"Ray listens on {facts['node_ip_address']}, not on 127.0.0.1 alone; it was stopped again")
    return RayLink(str(facts["address"]), str(home), str(token) if is_token_auth_enabled() else None)


def connect_ray(address: str, token: str | None = None) -> RayLink:
    """Connect to a Ray that runs at `address` ("auto": the one that Ray itself finds)."""
    if token:
        _authenticate(token)
    if address.startswith("127."):
        _stay_on_loopback()  # else Ray would look for this address at the machine's outer one
    import ray

    context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    return RayLink(str(context.address_info["address"]), None, token)


def stop_ray(link: RayLink, *, keep_logs: bool = False) -> None:
    """Disconnect; end a Ray of our own with all its processes, and remove its folder unless its logs are wanted."""
    import ray

    ray.shutdown()
    if link.folder and keep_logs:
        (Path(link.folder) / _OWNER).unlink(missing_ok=True)
    elif link.folder:
        shutil.rmtree(link.folder, ignore_errors=True)


def logs_of(link: RayLink) -> Path | None:
    """Where the logs of our own Ray lie."""
    return Path(link.folder) / _RAY_PART / "session_latest" / "logs" if link.folder else None


def remember(link: RayLink, run_dir: Path, service: str, url: str) -> Path:
    """Note where `service` runs, for `tidegate status` in another terminal."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = run_dir / f"{service}.json"
    note.write_text(json.dumps({"link": asdict(link), "url": url, "pid": os.getpid()}))
    return note


def recall(run_dir: Path, service: str | None = None, url: str | None = None) -> Note | None:
    """The note of a live service on this machine: of `service`, of the one at `url`, or of any."""
    for note in notes(run_dir):
        if note.is_live and service in (None, note.service) and url in (None, note.url):
            return note
    return None


def notes(run_dir: Path) -> list[Note]:
    """All notes that can be read, those of processes that are gone too."""
    found = []
    for path in sorted(run_dir.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # unreadable: none of ours, or half of one
            note = json.loads(path.read_text())
            found.append(Note(path.stem, RayLink(**note["link"]), str(note["url"]), path, int(note["pid"])))
    return found


def _local(home: Path, cpus: int | None) -> dict[str, Any]:
    return {
        "address": "local",
        "num_cpus": cpus,
        "object_store_memory": OBJECT_STORE,
        "include_dashboard": False,
        "dashboard_host": "127.0.0.1",
        "log_to_driver": False,
        "logging_level": "ERROR",
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(home / _RAY_PART),
    }


def _short_folder() -> Path:
    parent = _parent()
    sweep(parent)
    home = Path(tempfile.mkdtemp(prefix="tidegate-", dir=parent))
    (home / _OWNER).write_text(str(os.getpid()))
    return home


def _parent() -> Path:
    """Where the folders of our Rays lie: the system's temporary folder, unless its path is too long for sockets."""
    system = Path(tempfile.gettempdir())
    home = system / "tidegate-12345678"
    ray_fits = len(str(home / _RAY_PART)) + _SOCKET_PART < _SOCKET_PATH
    return system if ray_fits and fits(home / _HAPROXY_PART) else Path("/tmp")


def sweep(parent: Path) -> None:
    """Remove the folders of ours that processes left which were killed: those whose owner is gone."""
    for folder in abandoned(parent):
        shutil.rmtree(folder, ignore_errors=True)


def abandoned(parent: Path | None = None) -> list[Path]:
    """Folders of this user's Rays whose owner is gone."""
    found = []
    for owner in (parent or _parent()).glob(f"tidegate-*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid == os.getuid() and not _lives(int(owner.read_text())):
                found.append(owner.parent)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's, but there
    return True


def _stay_on_loopback() -> None:
    """Tell Ray, and all that it will start, that this machine's address is 127.0.0.1."""
    os.environ.update(LOOPBACK)
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # read from the environment when ray was first imported


def _authenticate(token: str) -> None:
    """Use the token in this file; Ray has read the mode when it was first imported, and does so again here."""
    os.environ.update({_TOKEN_PATH: token, "RAY_AUTH_MODE": "token"})
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")


def make_token(path: Path) -> None:
    """A file that its owner alone can read, with a random token; one that exists stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        contextlib.suppress(FileExistsError),
        open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
    ):
        file.write(secrets.token_hex(32))
