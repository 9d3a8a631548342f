"""README's map of the house: one line for every file, and none for a file that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_has_a_line_for_every_file() -> None:
    told: set[str] = set()
    folder = ""
    for line in (ROOT / "README.md").read_text(encoding="utf-8").split("## Every file")[1].splitlines():
        if heading := re.match(r"\*\*`([\w/]+)/`\*\*", line):
            folder = heading[1]
        elif row := re.match(r"\| `(\w+\.py)` \| .+ \|", line):
            told.add(f"{folder}/{row[1]}")
    layers = ("kvstore", "workers", "cluster", "deploy")
    there = {str(path.relative_to(ROOT)) for layer in layers for path in (ROOT / layer).rglob("*.py")}
    assert told == {name for name in there if not name.endswith("__init__.py")}
