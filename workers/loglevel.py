"""How much a process of ours says in its log. Knows the names of our loggers, not where they write."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")
OURS = ("ray.serve", "tidegate", "cluster", "workers", "kvstore")
"""Serve's replicas write theirs through the first."""


def set_log_level(level: str) -> None:
    """One of LEVELS, from now on. ValueError for another word."""
    if level not in LEVELS:
        raise ValueError(f"log_level must be one of {', '.join(LEVELS)}, got {level!r}")
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
