"""The routes about a client's own session: what is cached of it, forget it, fill it before it is needed.

A session of another tenant is simply another one: nothing here can tell that it exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel

from cluster.coordination.cards import SessionCopy
from cluster.errors import ApiError
from cluster.generation import Completer
from cluster.protocol.answers import Usage
from cluster.protocol.api import PrewarmRequest
from cluster.protocol.caller import Caller, check_session
from cluster.protocol.choice import collected, merged
from cluster.protocol.connection import Connection
from cluster.protocol.fields import CHAT, COMPLETION, Neutral
from cluster.protocol.intake import Intake
from cluster.protocol.reader import Reader


class Copy(BaseModel):
    """What one group holds: `blocks`, in tokens at most `tokens`, and in how many seconds they expire unless used."""

    group: str
    blocks: int
    tokens: int
    expires_s: float


class Session(BaseModel):
    """A session as the groups last reported it, about a second ago at most; without copies nothing is cached.

    Where all of a tenant's requests share one cache, this is that cache."""

    id: str
    object: Literal["session"] = "session"
    blocks: int
    copies: list[Copy]

    @classmethod
    def of(cls, id: str, copies: Sequence[SessionCopy]) -> Session:
        """From what the coordinator says."""
        shown = [
            Copy(group=one.group, blocks=one.blocks, tokens=one.tokens, expires_s=round(max(0.0, one.expires_s), 1))
            for one in copies
        ]
        return cls(id=id, blocks=sum(one.blocks for one in shown), copies=shown)


class ForgottenSession(BaseModel):
    """Every group has forgotten the session and will have zeroed its `blocks` before they are used again."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True
    blocks: int


class PrewarmedSession(BaseModel):
    """What it took, and the session, where it is known already."""

    id: str
    object: Literal["session.prewarmed"] = "session.prewarmed"
    model: str
    usage: Usage
    session: Session | None


class Sessions:
    """Handlers of /v1/sessions."""

    def __init__(self, completer: Completer, intake: Intake, reader: Reader) -> None:
        self._completer = completer
        self._intake = intake
        self._reader = reader

    async def show(self, session: str, request: Request) -> Session:
        """What is cached of a session."""
        caller = self._caller(session, request)
        return Session.of(session, await self._completer.session(caller.tenant.name, session))

    async def forget(self, session: str, request: Request) -> ForgottenSession:
        """Forget a session's cache in every group. Answers when all have confirmed; sending it again does no harm.
        Where all of a tenant's requests share one cache, that one is forgotten."""
        caller = self._caller(session, request)
        blocks = await self._completer.forget_session(caller.tenant.name, session)
        return ForgottenSession(id=session, blocks=blocks)

    async def prewarm(self, session: str, request: Request) -> PrewarmedSession:
        """Compute a prompt's head into a session's cache, and generate nothing."""
        _check(session)
        asked, caller = await self._reader.read(request, PrewarmRequest, _table)
        choices = await self._intake.prewarm(asked, caller.within(session))
        connection = Connection(request.receive)
        try:
            async with aclosing(merged(self._completer, choices)) as deltas:
                await connection.run(collected(deltas, choices))
        finally:
            connection.close()
        return PrewarmedSession(
            id=session, model=asked.model, usage=Usage.of(choices), session=await self._known(caller, session)
        )

    def _caller(self, session: str, request: Request) -> Caller:
        caller = self._reader.caller(request)
        _check(session)
        return caller

    async def _known(self, caller: Caller, session: str) -> Session | None:
        """The work is done: that nobody can say how the session stands now does not undo it."""
        try:
            return Session.of(session, await self._completer.session(caller.tenant.name, session))
        except ApiError:
            return None


def _check(session: str) -> None:
    if not session:
        raise ApiError("The path names no session.", "not_found")
    check_session(session, "session")


def _table(body: Mapping[str, Any]) -> Mapping[str, Neutral]:
    return CHAT if body.get("messages") is not None else COMPLETION
