"""The coordinator and a group's engine as an ingress sees them. Real ones carry calls over Ray, tests use objects in
the process. Every call may fail with any exception: its effect is then unknown and whoever called must cope."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from cluster.coordination.cards import GroupState, SessionCopy
from cluster.coordination.grants import Ask, Grant, LineNews, Outcome, Refusal, Ticket
from workers.errors import EngineRefused
from workers.outbox import Message
from workers.sequence import Request


class CoordinatorPort(Protocol):
    """Calls to the coordinator, in batches. Each is idempotent, so that a call that failed can be made again."""

    async def place(self, asks: tuple[Ask, ...]) -> tuple[Grant | Ticket | Refusal, ...]:
        """One answer per ask, in order; never waits."""
        ...

    async def news(self, acked: int) -> LineNews:
        """What became of this ingress's tickets, behind number `acked`; waits a while when there is nothing. An ingress
        that does not ask for news loses its places in the line."""
        ...

    async def leave_line(self, keys: tuple[tuple[str, int], ...]) -> None:
        """These (request, attempt) wait no more."""
        ...

    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        """These grants have ended."""
        ...

    async def withdraw(self, grants: tuple[str, ...]) -> None:
        """These grants will not be used."""
        ...

    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        ...

    async def session(self, namespaces: tuple[bytes, ...]) -> tuple[SessionCopy, ...]:
        """What the groups have reported to have cached under these namespaces."""
        ...


class EnginePort(Protocol):
    """Calls from one ingress to one group. GroupDead from any of them is final: this incarnation will not answer."""

    async def subscribe(self, acked: int | None) -> AsyncGenerator[Message, None]:
        """Open the event stream; returns when the engine has the outbox. `acked` None: a new lease; otherwise go on
        behind that message. EngineRefused when the lease has lapsed. At most one stream is read at a time; the stream
        ends when the engine closes the outbox and fails when the way to it is lost."""
        ...

    async def submit(self, requests: tuple[Request, ...]) -> tuple[EngineRefused | None, ...]:
        """Per request, in order: None when accepted."""
        ...

    async def abort(self, keys: tuple[tuple[str, int], ...]) -> None:
        """End these (request, attempt); unknown ones are ignored."""
        ...

    async def ack(self, number: int) -> None:
        """Messages up to `number` have been handled."""
        ...

    async def renew(self) -> bool:
        """Renew the lease; False when it has lapsed."""
        ...

    async def unsubscribe(self) -> None:
        """This ingress needs the group no more."""
        ...

    async def purge(self, namespace: bytes) -> int:
        """Forget and zero what `namespace` has cached; returns the blocks, once none of it can be found any more."""
        ...

    def close(self) -> None:
        """Whoever subscribed needs the way to the group no more."""
        ...
