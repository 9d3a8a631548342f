"""Autopsy: the file that is left of a group that died or hung: where each rank was, and the flight recorder's last
plans. Writes a file; asks nobody and knows no clock.

JSON lines, so that the plans in it can be run again: see `workers.recorder.replay`. They hold token ids, parts of
prompts and answers, so the file is its owner's alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from workers.stacks import RankState

KEPT = 20
"""Files that stay in a folder; the oldest go first."""
_PATTERN = "tidegate-flight-*.jsonl"


def write_autopsy(
    folder: Path, name: str, facts: Mapping[str, object], ranks: Sequence[RankState | str], recording: str
) -> Path:
    """Write what is known of the incarnation `name` into `folder` (made where it is missing), and say where.

    `ranks` in their order: a state, or in words why there is none; `recording` are rank 0's lines. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _PATTERN.replace("*", re.sub(r"[^\w.-]", "_", name))
    lines = [{"kind": "death", "incarnation": name, **facts}]
    for rank, state in enumerate(ranks):
        known = {"silent": state} if isinstance(state, str) else asdict(state)
        lines.append({"kind": "rank", "rank": rank, **known})
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
        file.write(recording)
    _forget_old(folder)
    return path


def _forget_old(folder: Path) -> None:
    files = sorted(folder.glob(_PATTERN), key=lambda path: path.stat().st_mtime)
    for path in files[:-KEPT]:
        path.unlink(missing_ok=True)
