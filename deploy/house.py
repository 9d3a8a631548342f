"""Is the code that runs the code that was meant? The import packages have plain names (cluster, workers, …), which
another distribution may also use: whichever Python finds first wins."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvstore", "workers", "cluster", "deploy")


def strangers(root: Path = ROOT) -> list[str]:
    """A line for each package of ours that Python would import from elsewhere than `root`."""
    lines = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if origin != root / name:
            lines.append(f"`import {name}` finds {origin or 'nothing'} instead of {root / name}")
    return lines


def tidegate_version() -> str:
    """The installed distribution's version."""
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "not installed"
