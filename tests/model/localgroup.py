"""A whole tensor-parallel group in one process: every rank a thread, the real engine on rank 0, no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from cluster.requests.mailbox import merge
from workers.engine import Engine
from workers.plan import Finish, GroupReport, TokenEvent
from workers.rank import Rank
from workers.sequence import Request
from workers.settings import GroupSettings

HOST = "127.0.0.1"


class LocalGroup:
    """Built on entering; `blocks` overrides the pool size that the ranks would choose."""

    def __init__(self, settings: GroupSettings, blocks: int) -> None:
        self._settings = settings
        self._blocks = blocks
        self.ranks = [Rank(rank, settings) for rank in range(settings.tensor_parallel_size)]
        self._followers: list[threading.Thread] = []
        self.engine: Engine | None = None

    def __enter__(self) -> LocalGroup:
        ranks = self.ranks
        address = ranks[0].open_store(HOST) if len(ranks) > 1 else None
        with ThreadPoolExecutor(len(ranks)) as threads:
            list(threads.map(lambda rank: rank.load(address, HOST), ranks))
        for rank in ranks:
            rank.allocate(self._blocks)
        self.engine = ranks[0].make_engine(self._blocks, "local")
        for rank in ranks[1:]:
            thread = threading.Thread(target=rank.follow, daemon=True)
            thread.start()
            self._followers.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ranks[0].stop()
        for thread in self._followers:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a follower outlived its group"

    def generate(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Run all requests together, as if they had been granted; their output tokens by id."""
        return {name: list(event.tokens) for name, event in self.answers(requests).items()}

    def answers(self, requests: Sequence[Request]) -> dict[str, TokenEvent]:
        """The same; all events of each request as one."""
        engine = self.engine
        assert engine is not None
        outbox = engine.subscribe("test", lambda: None, time.monotonic())
        answers: dict[str, TokenEvent] = {}
        for request in requests:
            engine.submit("test", replace(request, grant=request.grant or f"{request.id}-{request.attempt}"))
        left = len(requests)
        while left:
            engine.turn(time.monotonic())
            engine.renew("test", time.monotonic())
            message = outbox.read()
            for event in message.events if message else ():
                before = answers.get(event.request)
                answers[event.request] = merge(before, event) if before else event
                assert event.finish is not Finish.ERROR, event.error
                left -= event.finish is not None
            if message:
                engine.ack("test", message.number)
        return answers

    def report(self) -> GroupReport:
        """The engine's report, by way of one turn."""
        assert self.engine is not None
        answer = self.engine.report(full=True)
        self.engine.turn(time.monotonic())
        return answer.result(timeout=0)
