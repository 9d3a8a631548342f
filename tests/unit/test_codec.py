"""What travels comes back equal, and nothing else is ever made from a message."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields, is_dataclass

import pytest

from kvstore.sessions import Terms
from workers import codec
from workers.codec import pack, unpack
from workers.errors import CallFailed, EngineRefused, Refused
from workers.outbox import Message
from workers.plan import Draw, Finish, GroupDead, Row, StepPlan, TokenEvent
from workers.sequence import Priority, Request, Sampling

REQUEST = Request(
    "r", (1, 2, 3), Sampling(5, stop_ids=frozenset({2})), b"n" * 32, 1, (9,), Priority.BATCH, "g", 3, 1.5, Terms()
)
VALUES = [
    StepPlan(3, (Row((1, 2), 0, ((4, 5),), Draw(0.5, 3, 0.9, 0.1, 7, 2)), Row((-1,), 8, ((1,),), None, 0)), ((1, 2),)),
    Message(7, 2, (TokenEvent("r", 0, 3, (4, 5), Finish.STOP, 6), TokenEvent("s", 1, 0, (), None, 0, "broken"))),
    (1, "submit", ("ingress", (REQUEST,))),
    (1, (None, Refused("r", 1, "code", "message")), None),
    None,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal(value: object) -> None:
    assert unpack(pack(value)) == value


def test_errors_come_back_with_their_words() -> None:
    for error in (EngineRefused("code", "message"), GroupDead("gone"), CallFailed("what")):
        back = unpack(pack(error))
        assert type(back) is type(error) and back.args == error.args


def test_every_dataclass_that_travels_travels_whole() -> None:
    """A new field must not be left behind."""
    for kind in codec._VALUES:
        assert is_dataclass(kind)
        value = kind(*range(len(fields(kind))))
        assert unpack(pack(value)) == value


@pytest.mark.parametrize("planted", [os.system, os.getpid, eval, pickle.loads, bytearray, GroupDead.__class__])
def test_a_message_makes_nothing_else(planted: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="nothing that travels"):
        unpack(pickle.dumps((1, planted)))


def test_a_message_calls_nothing_else() -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("false",)

    with pytest.raises(pickle.UnpicklingError, match="nothing that travels"):
        unpack(pickle.dumps(Trap()))
