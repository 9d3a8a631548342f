"""How values travel between a group's processes and its ingresses: plans, events, requests. Knows no socket, no tensor.

Pickle, with what may be in it fixed: frozen dataclasses are taken apart by their fields (two to three times faster than
their own way), and reading makes nothing but the kinds listed here, so that a message can never run code.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from kvstore.sessions import Terms
from workers.errors import CallFailed, EngineRefused, Refused
from workers.logprobs import Logprobs
from workers.outbox import Message
from workers.plan import Bend, Draw, Finish, GroupDead, Penalties, Row, Score, StepPlan, TokenEvent
from workers.sequence import Priority, Request, Sampling

_PLANNED = (StepPlan, Row, Draw, Bend, Penalties, Score)
_VALUES = (*_PLANNED, Message, TokenEvent, Logprobs, Request, Sampling, Terms, Refused)
_OTHERS = (Finish, Priority, EngineRefused, GroupDead, CallFailed, frozenset)


def _by_fields(kind: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    values = attrgetter(*(field.name for field in fields(kind)))
    return lambda value: (kind, values(value))


_PARTS = copyreg.dispatch_table | {kind: _by_fields(kind) for kind in _VALUES}
_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in (*_VALUES, *_OTHERS)}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that travels") from None


def pack(value: object) -> bytes:
    """`value` (built of the kinds above and plain values) as bytes."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _PARTS
    pickler.dump(value)
    return content.getvalue()


class _ForbearingReader(_Reader):
    """Leaves out of account what a newer peer's values have behind the fields that are known here."""

    def find_class(self, module: str, name: str) -> Any:
        kind = super().find_class(module, name)
        if kind not in _VALUES:
            return kind
        known = len(fields(kind))
        return lambda *values: kind(*values[:known])


def unpack(content: bytes) -> Any:
    """The value again; pickle.UnpicklingError when something else is in it, whatever pickle raises for garbage."""
    try:
        return _Reader(io.BytesIO(content)).load()
    except TypeError:  # more fields than there are: rare, so that nobody else pays for it
        return _ForbearingReader(io.BytesIO(content)).load()
