"""A YAML file as plain values, and the line on which each key stands. Knows nothing of what the keys mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

Place = tuple[str, ...]
"""The keys and list positions that lead to a value."""


class DocumentError(ValueError):
    """The file cannot be read as one mapping; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Document:
    """`values` as YAML gives them; `lines` maps the path of a key or list entry, as in ("models", "0", "groups"), to
    its line (from 1); `source` names the file."""

    source: str
    values: Mapping[str, object]
    lines: Mapping[Place, int]

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
        lines: dict[Place, int] = {}
        _note_lines(path, root, (), lines)
        return cls(str(path), {str(key): value for key, value in values.items()}, lines)

    def where(self, *place: str) -> str:
        """ "file:line" of the key at `place`, of what it stands in where it is not in the file itself, or the file
        alone."""
        for length in range(len(place), 0, -1):
            if line := self.lines.get(place[:length]):
                return f"{self.source}:{line}"
        return self.source


def _note_lines(path: Path, node: yaml.Node, place: Place, lines: dict[Place, int]) -> None:
    """Fill `lines` for everything below `node`, which stands at `place`."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = (*place, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                name = ".".join(key)
                raise DocumentError(f"{path}:{line}: {name} stands here a second time; it was set on line {lines[key]}")
            lines[key] = line
            _note_lines(path, value, key, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*place, str(index)] = item.start_mark.line + 1
            _note_lines(path, item, (*place, str(index)), lines)
