"""Messages that outlive a release: values that processes of two versions send each other while a service is updated.

A message travels as its fields' values in order. So fields are only ever added, behind the others and with a default:
then who does not know the new ones leaves them out of account, and who misses them takes the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def message(kind: type[Kind]) -> type[Kind]:
    """A frozen dataclass with slots whose pickled values an older and a newer version of it understand."""
    own: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]

    def __setstate__(self: object, state: Sequence[object]) -> None:
        for field, value in zip(own, state, strict=False):
            object.__setattr__(self, field.name, value)
        for field in own[len(state) :]:
            object.__setattr__(self, field.name, _default(field))

    kind.__setstate__ = __setstate__  # type: ignore[attr-defined]
    return kind


def _default(field: Field[Any]) -> object:
    """What an older peer meant by not knowing the field; TypeError where that cannot be known."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise TypeError(f"{field.name} is missing in an older peer's message and has no default")
    return field.default
