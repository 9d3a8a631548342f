"""How an ingress reaches a group's rank 0: over a connection of its own where there can be one, else through Ray."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.links import EngineLink
from workers.errors import CODE_NO_LEASE, EngineRefused, Refused
from workers.outbox import Message
from workers.plan import GroupDead, TokenEvent
from workers.sequence import Request, Sampling
from workers.switchboard import Doorway, Switchboard

REQUESTS = (Request("a", (1,), Sampling(1), b""), Request("b", (1,), Sampling(1), b""))


def message(number: int) -> Message:
    return Message(number, 1, (TokenEvent("r", 0, number, (number,)),) if number else ())


class Rank:
    """Rank 0's actor as a link sees it. `asked` counts calls by the way they came, `last` ends its streams."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.dead = False
        self.refused: Refused | None = None
        self.door: Doorway | None = None
        self.last = 2
        self.board = Switchboard(
            {name: self._way(f"{name} direct", answer) for name, answer in self._answers().items()}, self._stream
        )

    def _answers(self) -> dict[str, Callable[..., Any]]:
        return {
            "submit": lambda _ingress, requests: (None, Refused(requests[1].id, 0, "full", "no room")),
            "abort": lambda _keys: None,
            "ack": lambda _ingress, _number: None,
            "renew": lambda _ingress: True,
            "unsubscribe": lambda _ingress: None,
            "purge": lambda _namespace: 3,
            "doorway": lambda: self.door,
        }

    def _way(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            self.asked[name] += 1
            return answer(*arguments)

        return call

    async def _stream(self, _ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
        self.asked["events"] += 1
        if self.refused:
            yield self.refused
            return
        yield message(0)
        for number in range((acked or 0) + 1, self.last + 1):
            yield message(number)

    def __getattr__(self, name: str) -> Any:
        if name == "events":
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._over_ray))
        answer = self._way(f"{name} ray", self._answers()[name])

        async def remote(*arguments: object) -> Any:
            if self.dead:
                raise ActorDiedError
            return answer(*arguments)

        return SimpleNamespace(remote=remote)

    async def _over_ray(self, *arguments: Any) -> AsyncGenerator[Awaitable[Message | Refused], None]:
        self.asked["events ray"] += 1
        async for item in self._stream(*arguments):

            async def reference(item: Message | Refused = item) -> Message | Refused:
                return item

            yield reference()


def run(scenario: Callable[[Rank, EngineLink], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        rank = Rank()
        monkeypatch.setattr("ray.get_actor", lambda *_: rank)
        link = EngineLink("address", "i")
        async with asyncio.timeout(30):
            try:
                await scenario(rank, link)
            finally:
                link.close()
                await rank.board.close()

    asyncio.run(body())


async def ask_everything(link: EngineLink, read: int) -> None:
    stream = await link.subscribe(None)
    assert [item.number async for item in stream][:read] == [1, 2]
    first, second = await link.submit(REQUESTS)
    assert first is None and isinstance(second, EngineRefused) and second.code == "full"
    await link.abort((("a", 0),))
    await link.ack(2)
    assert await link.renew() is True
    assert await link.purge(b"n") == 3
    await link.unsubscribe()


OFTEN = ("submit", "abort", "ack", "renew")


def test_what_is_asked_often_goes_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        rank.door = await rank.board.listen("127.0.0.1")
        await ask_everything(link, 2)
        rare = {"doorway ray": 1, "purge ray": 1, "unsubscribe ray": 1}
        assert rank.asked == {f"{name} direct": 1 for name in OFTEN} | {"events": 1} | rare
        resumed = await link.subscribe(1)  # on the connection that stands
        assert [item.number async for item in resumed] == [2] and rank.asked["doorway ray"] == 1

    run(scenario, monkeypatch)


def test_without_a_doorway_everything_goes_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        await ask_everything(link, 2)
        assert rank.asked["events ray"] == 1 and all(rank.asked[f"{name} ray"] == 1 for name in OFTEN)

    run(scenario, monkeypatch)


def test_a_doorway_that_cannot_be_reached_costs_nothing_but_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        rank.door = Doorway("127.0.0.1", port, b"t" * 32)
        await ask_everything(link, 2)
        assert rank.asked["events ray"] == 1
        assert f"127.0.0.1:{port}" in caplog.text

    run(scenario, monkeypatch)


def test_a_lost_connection_is_made_again_and_ray_helps_out_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        rank.door = await rank.board.listen("127.0.0.1")
        stream = await link.subscribe(None)
        await rank.board.close()
        with pytest.raises(ConnectionError):
            while True:
                await anext(stream)
        assert await link.renew() is True and rank.asked["renew ray"] == 1
        rank.board = Switchboard({"renew": rank._way("renew direct", lambda _: True)}, rank._stream)
        rank.door = await rank.board.listen("127.0.0.1")
        assert [item.number async for item in await link.subscribe(1)] == [2]
        assert await link.renew() is True and rank.asked["renew direct"] == 1

    monkeypatch.setattr(Rank, "_stream", _endless(Rank._stream))
    run(scenario, monkeypatch)


def _endless(stream: Any) -> Any:
    """`stream`, going on when it is read from its start until the connection is lost."""

    async def read(self: Rank, ingress: str, acked: int | None) -> AsyncGenerator[Message | Refused, None]:
        async for item in stream(self, ingress, acked):
            yield item
        if acked is None:
            await asyncio.get_running_loop().create_future()

    return read


def test_a_dead_rank_is_told_from_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        rank.door = await rank.board.listen("127.0.0.1")
        await link.subscribe(None)
        rank.dead = True
        await rank.board.close()
        while link._line is not None and link._line.is_open:
            await asyncio.sleep(0.01)
        with pytest.raises(GroupDead):
            await link.subscribe(0)
        with pytest.raises(GroupDead):
            await link.submit(REQUESTS)

    run(scenario, monkeypatch)


@pytest.mark.parametrize("direct", [False, True])
def test_a_lapsed_lease_refuses_the_stream(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rank: Rank, link: EngineLink) -> None:
        if direct:
            rank.door = await rank.board.listen("127.0.0.1")
        rank.refused = Refused("", 0, CODE_NO_LEASE, "lapsed")
        with pytest.raises(EngineRefused, match="lapsed"):
            await link.subscribe(4)

    run(scenario, monkeypatch)
