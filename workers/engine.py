"""A group's step loop: inbox → scheduler → ranks → outboxes; leases of its ingresses; report and limits.

Joins a Scheduler and a Group and nothing else. `turn` belongs to one step thread; the other public methods may be
called from any thread. Time comes in as `now`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

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
from workers.plan import Finish, Group, GroupDead, GroupReport, Limits, TokenEvent
from workers.scheduler import Scheduler
from workers.sequence import Request

Key = tuple[str, int]


@dataclass(slots=True)
class _Subscriber:
    """One ingress: its outbox, when its lease lapses, and its live requests."""

    outbox: Outbox
    lapses: float
    requests: set[Key]


class Engine:
    """`depth` steps may be in flight at once (1 or 2); an ingress that does not renew its lease for `lease_s` loses its
    requests; every `audit_s` the block references are compared with the tables."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: Group,
        *,
        name: str,
        epoch: int,
        depth: int = 1,
        lease_s: float = 5.0,
        audit_s: float = 30.0,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"overlap depth must be 1 or 2, got {depth}")
        self.name = name
        self.epoch = epoch
        self.work = threading.Event()
        self.dead: BaseException | None = None
        self._scheduler = scheduler
        self._group = group
        self._depth = depth
        self._lease_s = lease_s
        self._audit_s = audit_s
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._handles: deque[object] = deque()
        self._subscribers: dict[str, _Subscriber] = {}
        self._ingress_of: dict[Key, str] = {}
        self._granted: dict[Key, int] = {}
        self._grants = GrantBook()
        self._draining = False
        self._reports = 0
        self._audited_at = 0.0

    # -- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, ingress: str, request: Request) -> None:
        """Take one attempt at one request, or raise EngineRefused. Subscribe first: its events go to the outbox."""
        obstacle = self._scheduler.obstacle(request)
        if obstacle:
            raise EngineRefused(CODE_NEVER_FITS, obstacle)
        key = (request.id, request.attempt)
        with self._lock:
            self._refuse(ingress, request, key)
            self._ingress_of[key] = ingress
            self._subscribers[ingress].requests.add(key)
            self._granted[key] = request.granted_blocks
            self._grants.accept(request.grant, key)
        self._post(lambda now: self._add(ingress, request, now))

    def abort(self, request: str, attempt: int) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        self._post(lambda now: self._abort((request, attempt), now))

    def subscribe(self, ingress: str, wake: Callable[[], None], now: float) -> Outbox:
        """Open the event stream of an ingress that is new here (or came back after its lease had lapsed)."""
        outbox = Outbox(self.epoch, wake)
        with self._lock:
            old = self._subscribers.get(ingress)
            self._subscribers[ingress] = _Subscriber(outbox, now + self._lease_s, set())
        if old:
            old.outbox.close()
            self._post(lambda at: self._abort_all(old.requests, at))
        return outbox

    def resubscribe(self, ingress: str, acked: int, wake: Callable[[], None], now: float) -> Outbox:
        """Take up a broken stream behind message `acked`. EngineRefused when the lease has lapsed in between."""
        with self._lock:
            subscriber = self._subscribers.get(ingress)
            if subscriber is None:
                raise EngineRefused(CODE_NO_LEASE, f"ingress {ingress} has no lease on group {self.name}")
            subscriber.lapses = now + self._lease_s
        subscriber.outbox.rewind(acked, wake)
        return subscriber.outbox

    def ack(self, ingress: str, number: int) -> None:
        """The ingress has handled messages up to `number`."""
        with self._lock:
            subscriber = self._subscribers.get(ingress)
        if subscriber:
            subscriber.outbox.acknowledge(number)

    def renew(self, ingress: str, now: float) -> bool:
        """Renew a lease; False when it has lapsed and the ingress must subscribe anew."""
        with self._lock:
            subscriber = self._subscribers.get(ingress)
            if subscriber:
                subscriber.lapses = now + self._lease_s
            return subscriber is not None

    def unsubscribe(self, ingress: str) -> None:
        """An ingress leaves: its requests are aborted."""
        self._post(lambda now: self._drop(ingress, now))

    def obey(self, limits: Limits | None, void: Iterable[str]) -> None:
        """The coordinator's reply: limits for the next steps, and grants that must not be accepted any more."""
        with self._lock:
            self._grants.void(void)
        if limits:
            self._post(lambda now: self._set_limits(limits))

    def report(self, *, full: bool = False) -> Future[GroupReport]:
        """The state as of the next turn, with all that happened since the report before. `full`: every session, not
        only those that changed."""
        answer: Future[GroupReport] = Future()
        self._post(lambda now: answer.set_result(self._make_report(now, full)))
        return answer

    def enter(self, epoch: int) -> None:
        """The coordinator knows this group as `epoch` from now on (it changes when the coordinator was restarted): so
        say messages and reports, those of open streams too."""
        with self._lock:
            self.epoch = epoch
            for subscriber in self._subscribers.values():
                subscriber.outbox.epoch = epoch

    def drain(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self._draining = True

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        with self._lock:
            return not self._ingress_of

    # -- the step thread ----------------------------------------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Take in what came, plan and launch a step, apply the oldest in flight. False when there was nothing to do:
        then wait on `work` for up to `patience(now)`."""
        self.work.clear()
        busy = False
        while self._inbox:
            self._inbox.popleft()(now)
            busy = True
        self._lapse(now)
        try:
            plan = self._scheduler.schedule(now)
            if plan is not None:
                self._handles.append(self._group.launch(plan))
            if self._handles and (plan is None or len(self._handles) >= self._depth):
                result = self._group.wait(self._handles.popleft())
                self._deliver(self._scheduler.apply(result, now))
                busy = True
        except BaseException as error:
            self._die(error)
            raise
        if now - self._audited_at >= self._audit_s:
            self._scheduler.store.audit(now)
            self._audited_at = now
        return busy or plan is not None

    def patience(self, now: float) -> float | None:
        """Seconds until `turn` has something to do by itself; None when only new work can bring it."""
        with self._lock:
            times = [subscriber.lapses for subscriber in self._subscribers.values()]
        expiry = self._scheduler.store.next_expiry()
        if expiry is not None:
            times.append(expiry)
        return max(0.0, min(times) - now) if times else None

    def _refuse(self, ingress: str, request: Request, key: Key) -> None:
        if self.dead is not None:
            raise EngineRefused(CODE_DEAD, f"group {self.name} is being rebuilt")
        if self._draining:
            raise EngineRefused(CODE_DRAINING, f"group {self.name} is draining")
        if ingress not in self._subscribers:
            raise EngineRefused(CODE_NO_LEASE, f"ingress {ingress} has no lease on group {self.name}")
        if key in self._ingress_of or self._grants.accepted(request.grant):
            raise EngineRefused(CODE_DUPLICATE, f"request {request.id} attempt {request.attempt} was accepted before")
        if self._grants.is_void(request.grant):
            raise EngineRefused(CODE_VOID, f"the grant of request {request.id} has expired")

    def _post(self, command: Callable[[float], None]) -> None:
        self._inbox.append(command)
        self.work.set()

    def _add(self, ingress: str, request: Request, now: float) -> None:
        """Start it, unless its ingress has lost its lease since `submit`: nobody would ever abort it."""
        key = (request.id, request.attempt)
        with self._lock:
            subscriber = self._subscribers.get(ingress)
            wanted = subscriber is not None and key in subscriber.requests
        if wanted:
            self._scheduler.add(request, now)
        else:
            self._deliver([TokenEvent(*key, len(request.resumed), (), Finish.ABORT)])

    def _abort(self, key: Key, now: float) -> None:
        event = self._scheduler.abort(*key, now)
        if event:
            self._deliver([event])

    def _abort_all(self, keys: Iterable[Key], now: float) -> None:
        for key in tuple(keys):
            self._abort(key, now)

    def _drop(self, ingress: str, now: float) -> None:
        with self._lock:
            subscriber = self._subscribers.pop(ingress, None)
        if subscriber:
            self._abort_all(subscriber.requests, now)
            subscriber.outbox.close()

    def _lapse(self, now: float) -> None:
        with self._lock:
            lapsed = [name for name, subscriber in self._subscribers.items() if subscriber.lapses <= now]
        for name in lapsed:
            self._drop(name, now)

    def _deliver(self, events: list[TokenEvent]) -> None:
        boxes: dict[str, list[TokenEvent]] = {}
        with self._lock:
            for event in events:
                key = (event.request, event.attempt)
                ingress = self._ingress_of.get(key, "")
                boxes.setdefault(ingress, []).append(event)
                if event.finish is not None:
                    self._ingress_of.pop(key, None)
                    self._granted.pop(key, None)
                    self._grants.end(key)
                    if ingress in self._subscribers:
                        self._subscribers[ingress].requests.discard(key)
            outboxes = {name: subscriber.outbox for name, subscriber in self._subscribers.items() if name in boxes}
        for name, outbox in outboxes.items():
            outbox.put(boxes[name])

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self.dead = error if isinstance(error, GroupDead) else GroupDead(f"step failed: {error!r}")
            boxes = [subscriber.outbox for subscriber in self._subscribers.values()]
        for box in boxes:
            box.close()

    def _set_limits(self, limits: Limits) -> None:
        self._scheduler.limits = limits

    def _make_report(self, now: float, full: bool) -> GroupReport:
        with self._lock:
            self._reports += 1
            accepted, voided = self._grants.news()
            live = self._grants.live
            granted = dict(self._granted)
        scheduler, store = self._scheduler, self._scheduler.store
        sessions = store.sessions.changes(now)
        return GroupReport(
            group=self.name,
            epoch=self.epoch,
            sequence=self._reports,
            step=scheduler.step,
            pool=store.report(),
            committed=self._committed(granted),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            accepted=accepted,
            live=live,
            voided=voided,
            full=full,
            sessions=store.sessions.rows(now) if full else sessions,
            leaked=store.leaked,
            **asdict(scheduler.counters),
        )

    def _committed(self, granted: dict[Key, int]) -> int:
        """Σ max(held, granted) over live requests, blocks that several hold once."""
        store = self._scheduler.store
        total = store.pool.shared
        for sequence in self._scheduler.live:
            held = store.owned_blocks(sequence.table) if sequence.table else 0
            total += max(held, granted.get((sequence.request.id, sequence.request.attempt), 0))
        return total
