"""A group's step loop: inbox → scheduler → ranks → outboxes; leases of its ingresses; report and limits.

Joins a Scheduler and a Group and nothing else. `turn` belongs to one step thread; the other public methods may be
called from any thread. Time comes in as `now`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from workers.door import Door
from workers.errors import CODE_DEAD, CODE_NEVER_FITS, CODE_NO_LEASE, EngineRefused
from workers.forecast import committed_blocks
from workers.inbox import Inbox
from workers.orders import Obedience, Orders
from workers.outbox import Outbox
from workers.plan import Finish, Group, GroupDead, GroupReport, Limits, TokenEvent
from workers.recorder import Recorder
from workers.reporting import make_report
from workers.scheduler import Scheduler
from workers.sequence import Request
from workers.subscribers import Key, Subscribers

AUDIT_SLICES = 64
"""In so many parts, at least, references are compared with the tables."""
MOST_AUDITED = 0.1
"""The share of the pool that is compared at once, however long the last time is ago: no step waits for long."""


class Engine:
    """`depth` steps may be in flight at once (1 or 2): with 2 the next one is launched while one runs that computes no
    part of a prompt, for whoever comes meanwhile would wait for both. An ingress that does not renew its lease for
    `lease_s` loses its requests; within `audit_s` every block's references are compared with the tables, a few at a
    time."""

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
        self.dead: BaseException | None = None
        self.recorder = Recorder()
        self._scheduler = scheduler
        self._group = group
        self._depth = depth
        self._audit_s = audit_s
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self.work = self._inbox.work
        self._handles: deque[object] = deque()
        self._is_long = False  # the step that was launched last
        self._subscribers = Subscribers(lease_s)
        self._door = Door(name, scheduler.store.total, self._subscribers)
        self._obedience = Obedience(scheduler)
        self._reports = 0
        self._audited_at = 0.0

    # -- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, ingress: str, request: Request) -> None:
        """Take one attempt at one request, or raise EngineRefused. Subscribe first: its events go to the outbox."""
        obstacle = self._scheduler.obstacle(request)
        if obstacle:
            raise EngineRefused(CODE_NEVER_FITS, obstacle)
        blocks = self._scheduler.store.blocks_for(request.longest)
        blocks = min(blocks, request.granted_blocks or blocks)
        with self._lock:
            if self.dead is not None:
                raise EngineRefused(CODE_DEAD, f"group {self.name} is being rebuilt")
            try:
                self._door.enter(ingress, request, blocks, self._scheduler.limits.max_num_seqs)
            finally:
                if self._door.knocked:
                    self.work.set()
        self._inbox.post(lambda now: self._add(ingress, request, now))

    def abort(self, request: str, attempt: int) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        self._inbox.post(lambda now: self._abort((request, attempt), now))

    def subscribe(self, ingress: str, wake: Callable[[], None], now: float) -> Outbox:
        """Open the event stream of an ingress that is new here (or came back after its lease had lapsed)."""
        outbox = Outbox(self.epoch, wake)
        with self._lock:
            old = self._subscribers.open(ingress, outbox, now)
        if old:
            old.outbox.close()
            self._inbox.post(lambda at: self._abort_all(old.requests, at))
        return outbox

    def resubscribe(self, ingress: str, acked: int, wake: Callable[[], None], now: float) -> Outbox:
        """Take up a broken stream behind message `acked`. EngineRefused when the lease has lapsed in between."""
        with self._lock:
            subscriber = self._subscribers.renew(ingress, now)
        if subscriber is None:
            raise EngineRefused(CODE_NO_LEASE, f"ingress {ingress} has no lease on group {self.name}")
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
            return self._subscribers.renew(ingress, now) is not None

    def unsubscribe(self, ingress: str) -> None:
        """An ingress leaves: its requests are aborted."""
        self._inbox.post(lambda now: self._drop(ingress, now))

    def obey(self, limits: Limits | None, void: Iterable[str], orders: Orders | None = None) -> None:
        """The coordinator's reply: limits for the next steps, never above the group's own, grants that must not be
        accepted any more, and orders. Limits that are not said again for OBEY_S seconds hold no longer."""
        with self._lock:
            self._door.grants.void(void)
        if limits:
            self._inbox.post(lambda now: self._obedience.limit(limits, now))
        if orders:
            self._inbox.post(lambda now: self._carry_out(orders))

    def report(self, *, full: bool = False) -> Future[GroupReport]:
        """The state as of the next turn, with all that happened since the report before. `full`: every session, not
        only those that changed. Raises GroupDead when no turn can answer any more."""
        return self._inbox.ask(lambda now: self._make_report(now, full))

    def purge(self, namespace: bytes) -> Future[int]:
        """From when this is answered, nothing that was computed for `namespace` before can be found here; how many
        blocks that were. They are zeroed, those in use when they are released."""
        return self._inbox.ask(lambda now: self._purge(namespace, now))

    def enter(self, epoch: int) -> None:
        """The coordinator knows this group as `epoch` from now on (it changes when the coordinator was restarted): so
        say messages and reports, those of open streams too."""
        with self._lock:
            self.epoch = epoch
            for outbox in self._subscribers.outboxes:
                outbox.epoch = epoch

    def drain(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self._door.draining = True

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        with self._lock:
            return not self._subscribers.requests

    def outboxes(self) -> tuple[Outbox, ...]:
        """Of all ingresses that have a lease."""
        with self._lock:
            return self._subscribers.outboxes

    # -- the step thread ----------------------------------------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Take in what came, plan and launch a step, apply the oldest in flight. False when there was nothing to do:
        then wait on `work` for up to `patience(now)`."""
        try:
            busy = self._inbox.run(now)
            self._lapse(now)
            if self._door.knocked:
                self._forecast()
            self._obedience.lapse(now)
            self._deliver(self._scheduler.end_late(now), now)
            plan = self._scheduler.schedule(now) if not (self._handles and self._is_long) else None
            if plan is not None:
                self.recorder.plan(plan, now)
                self._is_long = plan.tokens > len(plan.rows)
                self._handles.append(self._group.launch(plan))
            if self._handles and (plan is None or len(self._handles) >= self._depth):
                result = self._group.wait(self._handles.popleft())
                self.recorder.result(result, now)
                self._deliver(self._scheduler.apply(result, now), now)
                busy = True
        except BaseException as error:
            self._die(error, now)
            raise
        self._audit(now)
        return busy or plan is not None

    def patience(self, now: float) -> float | None:
        """Seconds until `turn` has something to do by itself; None when only new work can bring it."""
        with self._lock:
            lapse = self._subscribers.next_lapse
        others = (self._scheduler.store.next_expiry(), self._scheduler.waiting.next_deadline)
        times = [time for time in (lapse, *others) if time is not None]
        return max(0.0, min(times) - now) if times else None

    def _add(self, ingress: str, request: Request, now: float) -> None:
        """Start it, unless its ingress has lost its lease since `submit`: nobody would ever abort it."""
        key = (request.id, request.attempt)
        with self._lock:
            wanted = self._subscribers.is_wanted(ingress, key)
            self._door.start(key)
        if wanted:
            self.recorder.note("add", now, request=request.id, attempt=request.attempt, prompt=len(request.prompt))
            self._scheduler.add(request, now)
        else:
            self._deliver([TokenEvent(*key, len(request.resumed), (), Finish.ABORT)], now)

    def _abort(self, key: Key, now: float) -> None:
        event = self._scheduler.abort(*key, now)
        if event:
            self._deliver([event], now)

    def _abort_all(self, keys: Iterable[Key], now: float) -> None:
        for key in tuple(keys):
            self._abort(key, now)

    def _drop(self, ingress: str, now: float) -> None:
        with self._lock:
            subscriber = self._subscribers.remove(ingress)
        if subscriber:
            self._abort_all(subscriber.requests, now)
            subscriber.outbox.close()

    def _lapse(self, now: float) -> None:
        with self._lock:
            lapsed = self._subscribers.lapsed(now)
        for name in lapsed:
            self._drop(name, now)

    def _deliver(self, events: list[TokenEvent], now: float) -> None:
        ended = [event for event in events if event.finish]
        with self._lock:
            mail = self._subscribers.route(events)
            for event in ended:
                self._door.end((event.request, event.attempt))
        for event in ended:
            finish = event.finish.value if event.finish else None
            self.recorder.note("end", now, request=event.request, attempt=event.attempt, finish=finish)
        for outbox, news in mail:
            outbox.put(news)

    def _die(self, error: BaseException, now: float) -> None:
        self.recorder.note("dead", now, error=repr(error))
        dead = error if isinstance(error, GroupDead) else GroupDead(f"step failed: {error!r}")
        with self._lock:
            self.dead = dead
        for box in self.outboxes():
            box.close()
        self._inbox.close(dead)

    def _carry_out(self, orders: Orders) -> None:
        self._obedience.adopt(orders)
        if orders.hand_over:
            with self._lock:  # each ingress finds its stream at an end, and replays elsewhere
                self._subscribers.end_leases()

    def _audit(self, now: float) -> None:
        passed = now - self._audited_at
        if passed >= self._audit_s / AUDIT_SLICES:
            self._scheduler.store.audit(now, min(passed / self._audit_s, MOST_AUDITED))
            self._audited_at = now

    def _purge(self, namespace: bytes, now: float) -> int:
        count = self._scheduler.purge(namespace)
        self.recorder.note("purge", now, blocks=count)
        return count

    def _forecast(self) -> int:
        committed = committed_blocks(self._scheduler.live, self._scheduler.store)
        with self._lock:
            self._door.update(committed)
        return committed

    def _make_report(self, now: float, full: bool) -> GroupReport:
        with self._lock:
            self._reports += 1
            grants = (*self._door.grants.news(), self._door.grants.live)
        return make_report(
            self._scheduler,
            now,
            group=self.name,
            epoch=self.epoch,
            sequence=self._reports,
            committed=self._forecast(),
            grants=grants,
            full=full,
            revision=self._obedience.revision,
        )
