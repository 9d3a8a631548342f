"""Starts HAProxy as Serve does, with two changes: a program, `python -I -S frontdoor.py HAPROXY WORDS…`.

It ends with the process that started it, however that ends; and its pages of statistics, which Serve opens on every
interface, become Unix sockets beside its configuration.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable

METRICS_PORT, STATS_PORT = 9101, 8404
"""What Serve writes for these pages unless told otherwise. Nothing listens there: the lines are looked for."""
_SET_DEATH_SIGNAL = 1
_PAGES = tuple(
    (re.compile(rf"^( *bind )\*?:{port}$", re.MULTILINE), name)
    for port, name in ((METRICS_PORT, "p"), (STATS_PORT, "s"))
)


def main() -> None:
    """Become HAProxy."""
    parent = os.getppid()
    program, *words = sys.argv[1:]
    if "-f" in words:
        move_pages(words[words.index("-f") + 1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # it holds nothing that it would have to save
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(program, [program, *words])


def move_pages(path: str) -> None:
    """Rewrite the configuration at `path`."""
    folder = os.path.dirname(path)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for bind, name in _PAGES:
        text = bind.sub(_moved_to(f"{folder}/{name}"), text)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _moved_to(socket: str) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}unix@{socket}"


if __name__ == "__main__":
    main()
