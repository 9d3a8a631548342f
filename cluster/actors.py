"""CoordinatorActor: the one coordinator of a service, as a named detached actor; and how to get hold of it.

A thin shell: clock, lock and calls around `Coordinator`. Knows no request and no group beyond what passes through.
Placing, reporting and waiting for news have threads of their own: nothing that waits can hold up a report.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from cluster.bells import Bells
from cluster.coordination.cards import OLDEST_PROTOCOL, PROTOCOL, GroupCard, GroupState, Identity, Reply, SessionCopy
from cluster.coordination.control import Command
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, LineNews, Outcome, Refusal, Ticket
from cluster.coordination.revisions import Edition, Revision
from cluster.legacy import recall, remember
from cluster.metrics import CoordinatorExporter
from cluster.notices import Notice, NoticeBoard
from cluster.registry import NAMESPACE, CoordinatorMissing, coordinator_name
from cluster.settings import CoordinatorSettings
from workers.loglevel import set_log_level
from workers.plan import GroupReport

TICK_S = 0.25
"""How often the coordinator looks at its deadlines by itself."""
POLL_S = 5.0
"""The longest that a poll for the line's news waits; less where the line forgets ingresses sooner."""
EXPORT_S = 1.0
"""Between two exports of metrics, or twenty times as long as one takes."""
_SETTINGS = "settings"
_START_S = 60.0
_TRIES = 50

_log = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"place": 256, "report": 256, "watch": 1024})
class CoordinatorActor:
    """`settings.config` identifies the deployment; another one's coordinator is replaced, not shared."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        revisions, cordoned = recall(settings)
        # Milliseconds: more than the epochs that a life can have given away by then, so that none comes twice.
        self._coordinator = Coordinator(
            settings.terms,
            first_epoch=int(time.time() * 1000),
            seed=secrets.randbits(32),
            revisions=revisions,
            cordoned=cordoned,
        )
        set_log_level(revisions.current.edition.live.log_level)
        self._lock = threading.Lock()
        self._bells, self._changes = Bells(), Bells()
        self._board = NoticeBoard()
        self._news = asyncio.Event()
        self._remembering = asyncio.Lock()
        self._heard: deque[GroupReport] = deque(maxlen=10_000)
        self._secret = secrets.token_bytes(32)
        self._poll_s = min(POLL_S, settings.terms.line.ingress_s / 2)
        self._called_at = time.monotonic()
        own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._keep_time, args=(own,), daemon=True).start()

    # -- for ingresses -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="report")
    async def identity(self) -> Identity:
        """What a caller looks at before it trusts this actor."""
        return Identity(PROTOCOL, self._settings.config, OLDEST_PROTOCOL, self._settings.version)

    @ray.method(concurrency_group="watch")
    async def revision(self, ingress: str, held: int, fault: str = "") -> Revision:
        """The settings in force; while that is revision `held`, waits a few seconds. `ingress` goes by that one, or
        would if it were not for `fault`."""
        until = time.monotonic() + self._poll_s
        with self._changes.listen(_SETTINGS) as bell:
            while True:
                bell.clear()
                with self._coordinating() as (coordinator, now):
                    revision = coordinator.revision(ingress, held, fault, now)
                if revision.number != held or now >= until:
                    return revision
                with suppress(TimeoutError):
                    await asyncio.wait_for(bell.wait(), until - now)

    @ray.method(concurrency_group="report")
    async def secret(self) -> bytes:
        """The key of the namespaces, where the operator gave none; it lives as long as this process."""
        return self._secret

    @ray.method(concurrency_group="place")
    async def place(self, ingress: str, asks: tuple[Ask, ...]) -> tuple[Grant | Ticket | Refusal, ...]:
        """One answer per ask, in order; never waits."""
        with self._coordinating() as (coordinator, now):
            return coordinator.place(ingress, asks, now)

    @ray.method(concurrency_group="watch")
    async def news(self, ingress: str, acked: int) -> LineNews:
        """What became of the tickets of `ingress` behind number `acked`; waits a few seconds when nothing has."""
        until = time.monotonic() + self._poll_s
        with self._bells.listen(ingress) as bell:
            while True:
                bell.clear()
                with self._coordinating() as (coordinator, now):
                    news = coordinator.news(ingress, acked, now)
                if news.answers or acked > news.number or now >= until:  # or it knows of another life
                    return news
                with suppress(TimeoutError):
                    await asyncio.wait_for(bell.wait(), until - now)

    @ray.method(concurrency_group="report")
    async def leave_line(self, keys: tuple[tuple[str, int], ...]) -> None:
        """These (request, attempt) wait no more."""
        with self._coordinating() as (coordinator, now):
            coordinator.leave_line(keys, now)

    @ray.method(concurrency_group="report")
    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        """These grants have ended."""
        with self._coordinating() as (coordinator, now):
            coordinator.settle(outcomes, now)

    @ray.method(concurrency_group="report")
    async def withdraw(self, grants: tuple[str, ...]) -> None:
        """These grants will not be used."""
        with self._coordinating() as (coordinator, now):
            coordinator.withdraw(grants, now)

    @ray.method(concurrency_group="report")
    async def session(self, namespaces: tuple[bytes, ...]) -> tuple[SessionCopy, ...]:
        """What the groups have reported to have cached under these namespaces."""
        with self._coordinating() as (coordinator, now):
            return coordinator.session(namespaces, now)

    # -- for groups ----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="report")
    async def report(self, report: GroupReport) -> Reply:
        """A group's news."""
        with self._coordinating() as (coordinator, now):
            reply = coordinator.report(report, now)
        self._heard.append(report)
        return reply

    @ray.method(concurrency_group="report")
    async def join(self, card: GroupCard) -> int:
        """A group that can take work; returns its epoch."""
        with self._coordinating() as (coordinator, now):
            return coordinator.join(card, now)

    @ray.method(concurrency_group="report")
    async def leave(self, group: str, epoch: int, replaced: bool = False) -> None:
        """A group takes nothing new any more; `replaced`: another one may be on its way."""
        with self._coordinating() as (coordinator, now):
            coordinator.leave(group, epoch, now, replaced=replaced)

    @ray.method(concurrency_group="watch")
    async def notice(self, group: str, text: str, failed: bool = False) -> None:
        """A group says how far it is, or why it did not come up."""
        self._now()
        self._board.post(group, text, failed)
        self._news.set()

    # -- for operators -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="place")
    async def carry_out(self, command: Command) -> Revision:
        """Do it, and remember it beyond this process; the settings that are in force then. RevisionError,
        UnknownGroup."""
        async with self._remembering:  # else an earlier command's memory might come to be kept last
            with self._coordinating() as (coordinator, now):
                revision = coordinator.carry_out(command, now)
                content = pickle.dumps((self._settings.config, *coordinator.memory))
            await asyncio.to_thread(remember, self._settings.service, content)
        set_log_level(revision.edition.live.log_level)
        self._changes.ring((_SETTINGS,))
        return revision

    @ray.method(concurrency_group="report")
    async def earlier(self) -> Edition | None:
        """The edition before the one in force, if there is one to return to."""
        with self._coordinating() as (coordinator, _):
            past = coordinator.memory[0].past
        return past[-1] if past else None

    # -- for whoever looks ---------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="report")
    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        with self._coordinating() as (coordinator, now):
            return coordinator.groups(now)

    @ray.method(concurrency_group="report")
    async def status(self) -> dict[str, object]:
        """Everything for people and programs, as plain JSON values."""
        with self._coordinating() as (coordinator, now):
            return coordinator.status(now)

    @ray.method(concurrency_group="watch")
    async def notices(self, after: int, patience_s: float) -> tuple[Notice, ...]:
        """News behind number `after`; waits up to `patience_s` when there is none."""
        deadline = self._now() + patience_s
        while not (found := self._board.after(after)) and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                break
        return found

    @ray.method(concurrency_group="report")
    async def latest_notice(self) -> int:
        """The number of the last notice."""
        return self._board.last

    # -- time ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _coordinating(self, *, called: bool = True) -> Iterator[tuple[Coordinator, float]]:
        """The coordinator to oneself, and the time; wakes whoever has got news by it."""
        with self._lock:
            yield self._coordinator, self._now() if called else time.monotonic()
            woken = self._coordinator.wakes()
        self._bells.ring(woken)

    def _now(self) -> float:
        self._called_at = time.monotonic()
        return self._called_at

    def _keep_time(self, own: ActorHandle) -> None:
        """The thread that moves the coordinator's deadlines, exports its metrics and ends what nobody calls."""
        exporter, pause, export_at = CoordinatorExporter(self._settings.service), threading.Event(), 0.0
        while not pause.wait(TICK_S):
            if time.monotonic() - self._called_at > self._settings.idle_s:
                ray.kill(own)
                return
            try:
                with self._coordinating(called=False) as (coordinator, now):
                    coordinator.tick(now)
                if now >= export_at:
                    self._export(exporter)
                    export_at = now + max(EXPORT_S, 20 * (time.monotonic() - now))
            except Exception:  # a thread that ended here would leave every deadline unattended
                _log.exception("the coordinator's clock stumbled")

    def _export(self, exporter: CoordinatorExporter) -> None:
        while self._heard:
            exporter.heard(self._heard.popleft())
        with self._coordinating(called=False) as (coordinator, now):
            status = coordinator.status(now)
        exporter.export(status, now)


def open_coordinator(settings: CoordinatorSettings, *, replace: bool = False) -> ActorHandle:
    """The coordinator of `settings.service` with this protocol and config: the one there is, else a new one.

    `replace`: end one that does not match, or that is of another version of the code. That is for whoever deploys: a
    replica must not, since one of an older deployment would end the coordinator of the newer. Blocks; from a coroutine
    call it in a thread. Raises CoordinatorMissing.
    """
    actor: Any = CoordinatorActor
    options = actor.options(
        name=coordinator_name(settings.service),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources={"node:__internal_head__": 0.001},
    )
    pause = threading.Event()
    for _ in range(_TRIES):
        handle = options.remote(settings)
        try:
            found: Identity = ray.get(handle.identity.remote(), timeout=_START_S)
            if found.serves(settings.config) and (not replace or found.version == settings.version):
                return handle
            if not replace:
                raise CoordinatorMissing(f"the coordinator of {settings.service} belongs to another deployment")
            ray.kill(handle)
        except RayActorError:
            pause.wait(0.1)  # it was dying: its name is free in a moment
    raise CoordinatorMissing(f"the coordinator of {settings.service} cannot be started")
