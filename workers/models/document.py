"""config.json and its like: a file that holds one JSON object, read in one place. Knows no field of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.models.rope import Unsupported


def load_object(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where there is no such file. Raises Unsupported for anything else."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Unsupported(f"{path} is not a JSON object")
    return content
