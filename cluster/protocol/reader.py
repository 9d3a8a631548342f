"""What every POST begins with: who asks, then the body, within its limit, as a checked model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from cluster.errors import ApiError
from cluster.protocol import body
from cluster.protocol.api import Frozen
from cluster.protocol.caller import Caller, Callers
from cluster.protocol.fields import Neutral, refuse_in_messages, refuse_unserved
from cluster.protocol.intake import Intake

LONG_BODY = 64 * 1024
"""Bytes; a longer body is parsed in a thread."""

Asked = TypeVar("Asked", bound=Frozen)
Table = Callable[[Mapping[str, Any]], Mapping[str, Neutral]]
"""Which fields are refused, given the body."""


class Reader:
    """`limit`: the most bytes of a body that are read."""

    def __init__(self, callers: Callers, intake: Intake, limit: int) -> None:
        self._callers = callers
        self._intake = intake
        self._limit = limit

    def caller(self, request: Request) -> Caller:
        """Who asks. Raises ApiError."""
        return self._callers.caller(request.headers)

    async def read(self, request: Request, model: type[Asked], table: Table) -> tuple[Asked, Caller]:
        """The body and who sent it. Raises ApiError; without a valid key none of the body is read."""
        caller = self.caller(request)
        body.check_type(request.headers.get("content-type", ""))
        try:
            raw = await body.read(request.headers, request.stream(), self._limit)
        except ClientDisconnect:
            raise ApiError("The client left before it had sent the whole body.", "client_closed") from None
        asked = await self._intake.off_loop(len(raw) > LONG_BODY, _parsed, raw, model, table)
        return asked, caller


def _parsed(raw: bytes, model: type[Asked], table: Table) -> Asked:
    value = body.parse(raw)
    refuse_unserved(value, table(value))
    refuse_in_messages(value)
    return body.check(model, value)
