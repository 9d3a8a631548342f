"""A stand-in for one group's engine, behind the same calls: blocks are counted, tokens are a function of the prompt.

Cheap enough for simulations of many groups; the outbox and the grant book are the real ones. No step thread: whoever
drives it calls `turn`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.store import PoolReport
from workers.errors import (
    CODE_DEAD,
    CODE_DRAINING,
    CODE_DUPLICATE,
    CODE_NEVER_FITS,
    CODE_NO_LEASE,
    CODE_VOID,
    EngineRefused,
)
from workers.grants import GrantBook
from workers.outbox import Outbox
from workers.plan import Finish, GroupReport, Limits, TokenEvent
from workers.sequence import Request, Sampling

VOCABULARY = 50
Key = tuple[str, int]


def token_at(prompt: tuple[int, ...], seed: int, position: int) -> int:
    """The token that every group must produce at `position` of the sequence that starts with `prompt`."""
    return hash((prompt, seed, position)) % VOCABULARY


def expected_output(prompt: tuple[int, ...], sampling: Sampling) -> tuple[tuple[int, ...], Finish]:
    """All tokens of a generation, and how it ends."""
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        output.append(token_at(prompt, sampling.seed, len(prompt) + len(output)))
        if output[-1] in sampling.stop_ids:
            return tuple(output), Finish.STOP
    return tuple(output), Finish.LENGTH


@dataclass
class _Live:
    request: Request
    output: list[int]
    prefill: int


@dataclass
class _Subscriber:
    outbox: Outbox
    lapses: float
    live: set[Key] = field(default_factory=set)


class StandInEngine:
    """`blocks` of `block_size` tokens, `max_num_seqs` slots, `chunk` prompt tokens per step and sequence."""

    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        chunk: int = 64,
        lease_s: float = 5.0,
    ) -> None:
        self.name, self.epoch = name, epoch
        self.blocks, self.block_size, self.max_num_seqs, self.chunk = blocks, block_size, max_num_seqs, chunk
        self.lease_s = lease_s
        self.dead: BaseException | None = None
        self.accepted_keys: list[tuple[Key, str]] = []
        self._subscribers: dict[str, _Subscriber] = {}
        self._ingress_of: dict[Key, str] = {}
        self._running: dict[Key, _Live] = {}
        self._waiting: dict[Key, _Live] = {}
        self._granted: dict[Key, int] = {}
        self._grants = GrantBook()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._draining = False
        self._reports = self._step = 0

    def submit(self, ingress: str, request: Request) -> None:
        key = (request.id, request.attempt)
        if len(request.prompt) + request.sampling.max_tokens > self.blocks * self.block_size:
            raise EngineRefused(CODE_NEVER_FITS, "larger than the pool")
        if self.dead:
            raise EngineRefused(CODE_DEAD, "dead")
        if self._draining:
            raise EngineRefused(CODE_DRAINING, "draining")
        if ingress not in self._subscribers:
            raise EngineRefused(CODE_NO_LEASE, "no lease")
        if key in self._ingress_of or self._grants.accepted(request.grant):
            raise EngineRefused(CODE_DUPLICATE, "accepted before")
        if self._grants.is_void(request.grant):
            raise EngineRefused(CODE_VOID, "void")
        self._grants.accept(request.grant, key)
        self.accepted_keys.append((key, request.grant))
        self._granted[key] = request.granted_blocks
        self._ingress_of[key] = ingress
        self._subscribers[ingress].live.add(key)
        live = _Live(request, list(request.resumed), len(request.prompt) + len(request.resumed))
        self._inbox.append(lambda now: self._waiting.__setitem__(key, live))

    def abort(self, request: str, attempt: int) -> None:
        self._inbox.append(lambda now: self._end((request, attempt), Finish.ABORT))

    def subscribe(self, ingress: str, wake: Callable[[], None], now: float) -> Outbox:
        old = self._subscribers.get(ingress)
        outbox = Outbox(self.epoch, wake)
        self._subscribers[ingress] = _Subscriber(outbox, now + self.lease_s)
        if old:
            old.outbox.close()
            self._inbox.append(lambda at: self._end_all(old.live))
        return outbox

    def resubscribe(self, ingress: str, acked: int, wake: Callable[[], None], now: float) -> Outbox:
        subscriber = self._subscribers.get(ingress)
        if subscriber is None:
            raise EngineRefused(CODE_NO_LEASE, "no lease")
        subscriber.lapses = now + self.lease_s
        subscriber.outbox.rewind(acked, wake)
        return subscriber.outbox

    def ack(self, ingress: str, number: int) -> None:
        if ingress in self._subscribers:
            self._subscribers[ingress].outbox.acknowledge(number)

    def renew(self, ingress: str, now: float) -> bool:
        if ingress in self._subscribers:
            self._subscribers[ingress].lapses = now + self.lease_s
        return ingress in self._subscribers

    def unsubscribe(self, ingress: str) -> None:
        self._inbox.append(lambda now: self._drop(ingress))

    def obey(self, limits: Limits | None, void: Iterable[str]) -> None:
        self._grants.void(void)

    def report(self, *, full: bool = False) -> Future[GroupReport]:
        answer: Future[GroupReport] = Future()
        self._inbox.append(lambda now: answer.set_result(self._make_report()))
        return answer

    def drain(self) -> None:
        self._draining = True

    @property
    def idle(self) -> bool:
        return not self._ingress_of

    def turn(self, now: float) -> bool:
        busy = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()(now)
        for name, subscriber in tuple(self._subscribers.items()):
            if subscriber.lapses <= now:
                self._drop(name)
        self._admit()
        events = [event for key, live in tuple(self._running.items()) if (event := self._advance(key, live))]
        if self._running or events:
            self._step += 1
            busy = True
        self._deliver(events)
        return busy

    @property
    def held(self) -> int:
        return sum(self._blocks_of(live) for live in self._running.values())

    def _blocks_of(self, live: _Live) -> int:
        return -(-(len(live.request.prompt) + len(live.output) + 1) // self.block_size)

    def _admit(self) -> None:
        for key, live in tuple(self._waiting.items()):
            room = self.blocks - sum(self._longest(other) for other in self._running.values())
            if len(self._running) >= self.max_num_seqs or self._longest(live) > room:
                return
            self._running[key] = self._waiting.pop(key)

    def _longest(self, live: _Live) -> int:
        return -(-(len(live.request.prompt) + live.request.sampling.max_tokens) // self.block_size)

    def _advance(self, key: Key, live: _Live) -> TokenEvent | None:
        live.prefill -= self.chunk
        if live.prefill > 0:
            return None
        request, index = live.request, len(live.output)
        token = token_at(request.prompt, request.sampling.seed, len(request.prompt) + index)
        live.output.append(token)
        finish = None
        if token in request.sampling.stop_ids:
            finish = Finish.STOP
        elif len(live.output) >= request.sampling.max_tokens:
            finish = Finish.LENGTH
        return TokenEvent(*key, index, (token,), finish, cached=len(request.prompt) // 2)

    def _end(self, key: Key, finish: Finish) -> None:
        live = self._running.get(key) or self._waiting.get(key)
        if live:
            self._deliver([TokenEvent(*key, len(live.output), (), finish)])

    def _end_all(self, keys: Iterable[Key]) -> None:
        for key in tuple(keys):
            self._end(key, Finish.ABORT)

    def _drop(self, ingress: str) -> None:
        subscriber = self._subscribers.pop(ingress, None)
        if subscriber:
            self._end_all(subscriber.live)
            subscriber.outbox.close()

    def _deliver(self, events: list[TokenEvent]) -> None:
        boxes: dict[str, list[TokenEvent]] = {}
        for event in events:
            key = (event.request, event.attempt)
            ingress = self._ingress_of[key]
            boxes.setdefault(ingress, []).append(event)
            if event.finish:
                del self._ingress_of[key], self._granted[key]
                self._grants.end(key)
                self._running.pop(key, None)
                self._waiting.pop(key, None)
                if ingress in self._subscribers:
                    self._subscribers[ingress].live.discard(key)
        for name, batch in boxes.items():
            if name in self._subscribers:
                self._subscribers[name].outbox.put(batch)

    def _make_report(self) -> GroupReport:
        self._reports += 1
        accepted, voided = self._grants.news()
        blocks = {**{k: 0 for k in self._waiting}, **{k: self._blocks_of(live) for k, live in self._running.items()}}
        return GroupReport(
            group=self.name,
            epoch=self.epoch,
            sequence=self._reports,
            step=self._step,
            pool=PoolReport(self.blocks, self.blocks - self.held, self.held, 0, 0, self.block_size),
            committed=sum(max(held, self._granted[key]) for key, held in blocks.items()),
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(live.prefill for live in self._waiting.values()),
            accepted=accepted,
            voided=voided,
            live=self._grants.live,
        )
