"""An operator's YAML or JSON text as checked values. Faults are named by their path; values are never repeated, since
the file may hold what must not reach a log.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

Model = TypeVar("Model", bound="Entry")


class DocumentError(ValueError):
    """The text is refused; the message says where and why."""


class Entry(BaseModel):
    """A mapping of such a file: unknown keys are refused, so that a slip of the pen is seen."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def read(text: str, shape: type[Model]) -> Model:
    """`text` as a `shape`. Raises DocumentError with the first fault, as "tenants[2].weight: must be …"."""
    try:
        values = yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise DocumentError(f"{where}not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise DocumentError("not valid YAML") from None
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    words = {"extra_forbidden": "unknown key", "missing": "is required", "model_type": "must be a mapping"}
    message = words.get(first["type"], first["msg"].replace("Input should be", "must be"))
    raise DocumentError(f"{path_of(first['loc'])}: {message}")


def path_of(location: tuple[int | str, ...]) -> str:
    """Where a value stands, as "tenants[2].keys[0]"."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or "the file"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: the reader of the file would see one, the program the other."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise yaml.constructor.ConstructorError(None, None, "a key stands here twice", node.start_mark)
        return super().construct_mapping(node, deep)
