"""The coordinator and a group's rank 0 over Ray, as `ports` describes them. They carry calls and translate failures;
they decide nothing.

A call that certainly did not and will not get through raises ConnectionError; a group that is gone for good raises
GroupDead. Nothing here blocks the event loop: looking up an actor by its name is done in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError

from cluster.actors import open_coordinator
from cluster.coordination.cards import GroupCard, GroupState, Identity, Reply, SessionCopy
from cluster.coordination.grants import Ask, Grant, LineNews, Outcome, Refusal, Ticket
from cluster.coordination.revisions import Revision
from cluster.directline import DirectLine
from cluster.registry import NAMESPACE, CoordinatorMissing, find_coordinator
from cluster.settings import CoordinatorSettings
from workers.errors import EngineRefused, Refused
from workers.outbox import Message
from workers.plan import GroupDead, GroupReport
from workers.sequence import Request

_log = logging.getLogger(__name__)

UNREAD_MESSAGES = 8
"""Messages under way through Ray that a reader has not taken; beyond that the outbox merges."""


class CoordinatorLink:
    """The coordinator of one service and config, for the ingress called `ingress` (None: any name of its own).
    Found again by name when it was started anew; one of another config is none of ours: a replica of an old deployment
    must not join the new one."""

    def __init__(self, settings: CoordinatorSettings, ingress: str | None, actor: ActorHandle) -> None:
        self._service = settings.service
        self._config = settings.config
        self._ingress = ingress or uuid.uuid4().hex
        self._actor: ActorHandle | None = actor

    @classmethod
    async def open(cls, settings: CoordinatorSettings, ingress: str | None = None) -> CoordinatorLink:
        """Connect to the coordinator of this very config; start it with these settings if there is none."""
        return cls(settings, ingress, await asyncio.to_thread(open_coordinator, settings))

    async def place(self, asks: tuple[Ask, ...]) -> tuple[Grant | Ticket | Refusal, ...]:
        """One answer per ask, in order."""
        answer: tuple[Grant | Ticket | Refusal, ...] = await self._call("place", self._ingress, asks)
        return answer

    async def news(self, acked: int) -> LineNews:
        """What became of this ingress's tickets behind number `acked`; waits a few seconds when nothing has."""
        answer: LineNews = await self._call("news", self._ingress, acked)
        return answer

    async def leave_line(self, keys: tuple[tuple[str, int], ...]) -> None:
        """These (request, attempt) wait no more."""
        await self._call("leave_line", keys)

    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        """These grants have ended."""
        await self._call("settle", outcomes)

    async def withdraw(self, grants: tuple[str, ...]) -> None:
        """These grants will not be used."""
        await self._call("withdraw", grants)

    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        answer: tuple[GroupState, ...] = await self._call("groups")
        return answer

    async def session(self, namespaces: tuple[bytes, ...]) -> tuple[SessionCopy, ...]:
        """What the groups have reported to have cached under these namespaces."""
        answer: tuple[SessionCopy, ...] = await self._call("session", namespaces)
        return answer

    async def secret(self) -> bytes:
        """The key of the namespaces, where the operator gave none."""
        answer: bytes = await self._call("secret")
        return answer

    async def join(self, card: GroupCard) -> int:
        """A group that can take work; returns its epoch."""
        answer: int = await self._call("join", card)
        return answer

    async def leave(self, group: str, epoch: int, *, replaced: bool = False) -> None:
        """A group takes nothing new any more; `replaced`: it goes on purpose, and another may be on its way."""
        await self._call("leave", group, epoch, replaced)

    async def revision(self, held: int, fault: str) -> Revision:
        """The settings in force; while that is revision `held`, waits a few seconds. `fault` is why others could not
        be taken."""
        answer: Revision = await self._call("revision", self._ingress, held, fault)
        return answer

    async def report(self, report: GroupReport) -> Reply:
        """A group's news."""
        answer: Reply = await self._call("report", report)
        return answer

    async def notice(self, group: str, text: str, failed: bool) -> None:
        """How far a group is, or why it did not come up."""
        await self._call("notice", group, text, failed)

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            actor = self._actor or await self._find()
            return await getattr(actor, method).remote(*arguments)
        except (RayActorError, CoordinatorMissing) as error:
            if isinstance(error, ActorDiedError):
                self._actor = None
            raise ConnectionError(f"the coordinator of {self._service} does not answer") from error

    async def _find(self) -> ActorHandle:
        actor = await asyncio.to_thread(find_coordinator, self._service)
        identity: Identity = await actor.identity.remote()
        if not identity.serves(self._config):
            raise CoordinatorMissing(f"the coordinator of {self._service} belongs to another deployment")
        self._actor = actor
        return actor


class EngineLink:
    """Rank 0 of one incarnation, called `address`, for the ingress `ingress`. From the first `subscribe` on, what is
    asked often goes over a connection of our own, where there can be one; everything else goes through Ray."""

    def __init__(self, address: str, ingress: str) -> None:
        self._address = address
        self._ingress = ingress
        self._actor: ActorHandle | None = None
        self._line: DirectLine | None = None

    async def subscribe(self, acked: int | None) -> AsyncGenerator[Message, None]:
        """Open the event stream, anew or behind message `acked`."""
        rank = await self._rank()
        line = await self._connect(rank)
        stream = line.events(self._ingress, acked) if line else _over_ray(rank, self._ingress, acked)
        first = await anext(stream, None)
        if first is None:
            raise ConnectionError("the event stream ended before it began")
        if isinstance(first, Refused):
            raise EngineRefused(first.code, first.message)
        return _messages(stream)

    async def submit(self, requests: tuple[Request, ...]) -> tuple[EngineRefused | None, ...]:
        """Per request, in order: None when accepted."""
        answers = await self._ask("submit", self._ingress, requests)
        return tuple(EngineRefused(answer.code, answer.message) if answer else None for answer in answers)

    async def abort(self, keys: tuple[tuple[str, int], ...]) -> None:
        """End these (request, attempt)."""
        await self._ask("abort", keys)

    async def ack(self, number: int) -> None:
        """Messages up to `number` have been handled."""
        await self._ask("ack", self._ingress, number)

    async def renew(self) -> bool:
        """Renew the lease; False when it has lapsed."""
        return bool(await self._ask("renew", self._ingress))

    async def unsubscribe(self) -> None:
        """This ingress needs the group no more."""
        await self._call("unsubscribe", self._ingress)

    async def purge(self, namespace: bytes) -> int:
        """Forget and zero what `namespace` has cached; returns the blocks, once it is done."""
        return int(await self._call("purge", namespace))

    def close(self) -> None:
        """Hang up; what is asked afterwards goes through Ray."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    async def _ask(self, method: str, *arguments: object) -> Any:
        if self._line is not None and self._line.is_open:
            return await self._line.call(method, *arguments)
        return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: object) -> Any:
        rank = await self._rank()
        return await _translated(getattr(rank, method).remote(*arguments))

    async def _connect(self, rank: ActorHandle) -> DirectLine | None:
        if self._line is not None and self._line.is_open:
            return self._line
        doorway = await _translated(rank.doorway.remote())
        if doorway is None:
            return None
        try:
            self._line = await DirectLine.open(doorway)
        except OSError as error:
            _log.warning("%r does not answer, Ray carries its events: %r", doorway, error)
            self._line = None
        return self._line

    async def _rank(self) -> ActorHandle:
        if self._actor is None:
            try:
                self._actor = await asyncio.to_thread(ray.get_actor, self._address, NAMESPACE)
            except ValueError:
                raise GroupDead(f"{self._address} is gone") from None
        return self._actor


async def _over_ray(rank: ActorHandle, ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": UNREAD_MESSAGES}
    stream = rank.events.options(**options).remote(ingress, acked)
    while True:
        try:
            reference = await anext(stream)
        except StopAsyncIteration:
            return
        yield await _translated(reference)


async def _messages(stream: AsyncGenerator[Message | Refused, None]) -> AsyncGenerator[Message, None]:
    async with aclosing(stream):
        async for item in stream:
            assert isinstance(item, Message), f"{item} in the middle of a stream"
            yield item


async def _translated(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ActorDiedError as error:
        raise GroupDead("its rank 0 has died") from error
    except RayActorError as error:
        raise ConnectionError("rank 0 does not answer") from error
