"""CoordinatorActor: the one coordinator of a service, as a named detached actor; and how to get hold of it.

A thin shell: clock, lock and calls around `Coordinator`. Knows no request and no group beyond what passes through.
Placing, reporting and waiting for news have threads of their own: nothing that waits can hold up a report.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from cluster.coordination.cards import PROTOCOL, GroupCard, GroupState, Reply
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Outcome, Refusal
from cluster.notices import Notice, NoticeBoard
from workers.plan import GroupReport

NAMESPACE = "tidegate"
"""Ray's namespace of all our named actors."""
IDLE_S = 600.0
"""A coordinator that nobody has called for so long ends itself."""
_START_S = 60.0
_TRIES = 50


class CoordinatorMissing(RuntimeError):
    """There is no coordinator of that service."""


@ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"place": 256, "report": 256, "watch": 256})
class CoordinatorActor:
    """`config` identifies the settings of the service; another one's coordinator is replaced, not shared."""

    def __init__(self, config: str, idle_s: float = IDLE_S) -> None:
        self._config = config
        self._coordinator = Coordinator(first_epoch=int(time.time()))
        self._lock = threading.Lock()
        self._board = NoticeBoard()
        self._news = asyncio.Event()
        self._secret = secrets.token_bytes(32)
        self._called_at = time.monotonic()
        own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_when_idle, args=(own, idle_s), daemon=True).start()

    @ray.method(concurrency_group="report")
    async def identity(self) -> tuple[int, str]:
        """(protocol, config): what a caller compares before it trusts this actor."""
        return PROTOCOL, self._config

    @ray.method(concurrency_group="report")
    async def secret(self) -> bytes:
        """The key of the namespaces, where the operator gave none; it lives as long as this process."""
        return self._secret

    @ray.method(concurrency_group="place")
    async def place(self, asks: tuple[Ask, ...]) -> tuple[Grant | Refusal, ...]:
        """One answer per ask, in order; never waits."""
        with self._lock:
            return self._coordinator.place(asks, self._now())

    @ray.method(concurrency_group="report")
    async def settle(self, outcomes: tuple[Outcome, ...]) -> None:
        """These grants have ended."""
        with self._lock:
            self._coordinator.settle(outcomes, self._now())

    @ray.method(concurrency_group="report")
    async def withdraw(self, grants: tuple[str, ...]) -> None:
        """These grants will not be used."""
        with self._lock:
            self._coordinator.withdraw(grants, self._now())

    @ray.method(concurrency_group="report")
    async def report(self, report: GroupReport) -> Reply:
        """A group's news."""
        with self._lock:
            return self._coordinator.report(report, self._now())

    @ray.method(concurrency_group="report")
    async def join(self, card: GroupCard) -> int:
        """A group that can take work; returns its epoch."""
        with self._lock:
            return self._coordinator.join(card, self._now())

    @ray.method(concurrency_group="report")
    async def leave(self, group: str, epoch: int) -> None:
        """A group takes nothing new any more."""
        with self._lock:
            self._coordinator.leave(group, epoch, self._now())

    @ray.method(concurrency_group="report")
    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        with self._lock:
            return self._coordinator.groups(self._now())

    @ray.method(concurrency_group="report")
    async def status(self) -> dict[str, object]:
        """Everything for people and programs, as plain JSON values."""
        with self._lock:
            return self._coordinator.status(self._now())

    @ray.method(concurrency_group="watch")
    async def notice(self, group: str, text: str, failed: bool = False) -> None:
        """A group says how far it is, or why it did not come up."""
        self._now()
        self._board.post(group, text, failed)
        self._news.set()

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

    def _now(self) -> float:
        self._called_at = time.monotonic()
        return self._called_at

    def _end_when_idle(self, own: ActorHandle, idle_s: float) -> None:
        tick = threading.Event()
        while not tick.wait(idle_s / 10):
            if time.monotonic() - self._called_at > idle_s:
                ray.kill(own)
                return


def coordinator_name(service: str) -> str:
    """The actor's name in NAMESPACE."""
    return f"tidegate-coordinator-{service}"


def open_coordinator(service: str, config: str, *, replace: bool = False, idle_s: float = IDLE_S) -> ActorHandle:
    """The coordinator of `service` with this protocol and `config`: the one there is, else a new one.

    `replace`: end one that does not match. That is for whoever deploys: a replica must not, since one of an older
    deployment would end the coordinator of the newer. Blocks; from a coroutine call it in a thread. Raises
    CoordinatorMissing.
    """
    actor: Any = CoordinatorActor
    options = actor.options(
        name=coordinator_name(service),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources={"node:__internal_head__": 0.001},
    )
    pause = threading.Event()
    for _ in range(_TRIES):
        handle = options.remote(config, idle_s)
        try:
            if tuple(ray.get(handle.identity.remote(), timeout=_START_S)) == (PROTOCOL, config):
                return handle
            if not replace:
                raise CoordinatorMissing(f"the coordinator of {service} belongs to another deployment")
            ray.kill(handle)
        except RayActorError:
            pause.wait(0.1)  # it was dying: its name is free in a moment
    raise CoordinatorMissing(f"the coordinator of {service} cannot be started")


def find_coordinator(service: str) -> ActorHandle:
    """The coordinator of `service`, whatever its config. Blocks for a call to Ray. Raises CoordinatorMissing."""
    try:
        return ray.get_actor(coordinator_name(service), NAMESPACE)
    except ValueError:
        raise CoordinatorMissing(f"no service called {service} runs on this Ray cluster") from None


def coordinator_services() -> list[str]:
    """The services that have a coordinator on this Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    prefix = coordinator_name("")
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def end_coordinator(service: str) -> None:
    """End the coordinator of `service`, if there is one."""
    try:
        ray.kill(find_coordinator(service))
    except CoordinatorMissing:
        return
