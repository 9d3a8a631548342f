"""A YAML file as plain values, and the line on which each key stands. Knows nothing of what the keys mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


class DocumentError(ValueError):
    """The file cannot be read as one mapping; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Document:
    """`values` as YAML gives them; `lines` maps a top-level key to its line (from 1); `source` names the file."""

    source: str
    values: Mapping[str, object]
    lines: Mapping[str, int]

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read `path`. Raises DocumentError when it is missing, no YAML, no mapping, or names a key twice."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{path}: cannot be read: {error}") from error
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise DocumentError(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from error
        except yaml.YAMLError as error:
            raise DocumentError(f"{path}: not valid YAML: {error}") from error
        if root is None:
            return cls(str(path), {}, {})
        if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
            raise DocumentError(f"{path}:{root.start_mark.line + 1}: expected `key: value` lines")
        lines = _lines(path, root)
        return cls(str(path), {str(key): value for key, value in values.items()}, lines)

    def where(self, key: str) -> str:
        """ "file:line" of a top-level key, or the file alone for a key that is not in it."""
        line = self.lines.get(key)
        return f"{self.source}:{line}" if line else self.source


def _lines(path: Path, root: yaml.MappingNode) -> dict[str, int]:
    lines: dict[str, int] = {}
    for key_node, _ in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            raise DocumentError(f"{path}:{line}: {key} stands here a second time; it was set on line {lines[key]}")
        lines[key] = line
    return lines
