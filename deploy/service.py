"""Service: one running Tidegate, from the moment its Ray stands until nothing of it is left.

Starts Serve and the application, follows what the groups say until the service answers, drains and removes it again.
Knows neither configs nor models.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.util.placement_group import placement_group_table

from cluster.actors import open_coordinator
from cluster.coordination.control import Revise
from cluster.legacy import edition_of
from cluster.notices import Notice
from cluster.registry import end_coordinator
from cluster.settings import CoordinatorSettings
from deploy.cluster import RayLink, logs_of, remember, stop_ray
from deploy.room import Demand, lack

Progress = Callable[[str], None]

PLACE_S = 25.0
"""Groups that have no place after so long do not get one."""
HEALTH_S = 60.0
"""How long the HTTP side may take once every group is ready."""
GROUPS = "group"
"""What the names of the groups' deployments begin with."""
_NEWS_S = 1.0
_LOOK_S = 0.1


class ServiceError(RuntimeError):
    """The service did not come up, or there is none; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: the application, whose groups are `demands`, behind host:port, and its coordinator; one that runs
    already with other settings is replaced. Stopping takes up to `drain_s`. `surges`: where groups are replaced,
    successors come first."""

    application: serve.Application
    coordinator: CoordinatorSettings
    host: str
    port: int
    demands: tuple[Demand, ...]
    drain_s: float
    surges: bool = False

    @property
    def groups(self) -> int:
        """Groups of all models together."""
        return sum(demand.groups for demand in self.demands)


class Service:
    """`name` names application and actors. Use `start`, then `close`, or `abandon` where it failed."""

    def __init__(self, link: RayLink, name: str, run_dir: Path) -> None:
        self.url = ""
        self._link = link
        self._name = name
        self._run_dir = run_dir
        self._note: Path | None = None
        self._drain_s = 0.0
        self._began_serve = False
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, plan: Plan, say: Progress) -> None:
        """Start everything and return when a request would be answered. Raises ServiceError."""
        self._drain_s = plan.drain_s
        if short := lack(plan.demands, _nodes()):
            raise ServiceError(f"there is no room: {short}")
        say("starting Serve")
        coordinator = open_coordinator(plan.coordinator, replace=True)
        self._began_serve = True
        serve.start(proxy_location="HeadOnly", http_options={"host": plan.host, "port": plan.port})
        self._make_room(plan, say)
        say("starting groups")
        target = serve.RunTarget(plan.application, name=self._name, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        self._follow(coordinator, plan, say)
        say("opening the HTTP port")
        self.url = f"http://{_bracketed(plan.host)}:{plan.port}"
        # Before the first answer: whoever gets one finds the note.
        self._note = remember(self._link, self._run_dir, self._name, self.url)
        self._await_health(plan)

    def update(self, plan: Plan, say: Progress, *, base: int | None = None, undo: bool = False) -> None:
        """Replace what runs under this name by `plan`, one group at a time; requests go on. `base` is the revision of
        the settings that it is to follow, `undo` that it is the one before that. Raises ServiceError."""
        self._drain_s, self._began_serve = plan.drain_s, True
        say("telling the coordinator")
        coordinator = open_coordinator(plan.coordinator, replace=True)
        last: int = ray.get(coordinator.latest_notice.remote())
        ray.get(coordinator.carry_out.remote(Revise(edition_of(plan.coordinator), base, undo)))
        say("replacing groups")
        target = serve.RunTarget(plan.application, name=self._name, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        self._follow(coordinator, plan, say, last)
        deadline, pause = time.monotonic() + plan.drain_s + HEALTH_S, threading.Event()
        while not self._is_running():
            if time.monotonic() > deadline:
                raise ServiceError("Serve has not replaced every replica in time; `serve status` says more")
            pause.wait(_LOOK_S)

    def close(self) -> None:
        """Let running answers end, then leave nothing behind: no application, no actor, no placement group, and no
        Ray if it is ours."""
        self._remove(keep_logs=False)

    def abandon(self, *, keep_logs: bool = False) -> Path | None:
        """Remove what `start` has left when it did not succeed. `keep_logs`: those of our own Ray stay where the answer
        says, if anything ran at all."""
        kept = logs_of(self._link) if keep_logs and self._began_serve else None
        self._remove(keep_logs=kept is not None)
        return kept

    def _remove(self, *, keep_logs: bool) -> None:
        if self._note:
            self._note.unlink(missing_ok=True)
        try:
            if self._began_serve:
                self._delete_application()
            end_coordinator(self._name)
            if self._began_serve and not self._link.folder and not serve.status().applications:
                serve.shutdown()
        finally:
            stop_ray(self._link, keep_logs=keep_logs)

    def _delete_application(self) -> None:
        deadline = time.monotonic() + self._drain_s + 30.0
        while True:
            try:
                return serve.delete(self._name)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise

    def _make_room(self, plan: Plan, say: Progress) -> None:
        """End the application of before where its groups leave no place for the new ones: Serve replaces group by group
        where there are no more than before, but looks for the additional ones' places before it ends any."""
        application = serve.status().applications.get(self._name)
        if application is None:
            return
        groups = [one for name, one in application.deployments.items() if name.startswith(GROUPS)]
        running = sum(sum(one.replica_states.values()) for one in groups)
        needs_room = len(plan.demands) > len(groups) or plan.groups > running or plan.surges
        if needs_room and lack(plan.demands, _nodes(free=True)):
            say("ending the groups of before")
            self._delete_application()

    def _follow(self, coordinator: ActorHandle, plan: Plan, say: Progress, last: int = 0) -> None:
        """Pass on what the groups say, behind notice `last`, until all are ready."""
        began = time.monotonic()
        heard: dict[str, str] = {}
        while sum(text == "ready" for text in heard.values()) < plan.groups:
            news: tuple[Notice, ...] = ray.get(coordinator.notices.remote(last, _NEWS_S))
            for notice in news:
                if notice.failed:
                    raise ServiceError(notice.text)
                last, heard[notice.group] = notice.number, notice.text
                say(_summary(heard, plan.groups))
            if not news:
                self._check(plan, len(heard), time.monotonic() - began)

    def _check(self, plan: Plan, begun: int, waited: float) -> None:
        """Silence: has Serve given up, or is there no place?"""
        application = serve.status().applications.get(self._name)
        if application is not None and application.status == "DEPLOY_FAILED":
            raise ServiceError(_deployment_faults(application))
        if begun < plan.groups and waited > PLACE_S and self._is_a_place_missing():
            free = _nodes(free=True)
            short = filter(None, (lack([replace(demand, groups=1)], free) for demand in plan.demands))
            raise ServiceError(
                f"{plan.groups - begun} of {plan.groups} groups found no place within {waited:.0f} s: "
                f"{next(short, 'Ray did not say why')}"
            )

    def _is_a_place_missing(self) -> bool:
        """Whether a group waits for its place. One that has it but has not said a word is only slow."""
        ours = f"::{self._name}#{GROUPS}"
        places = placement_group_table().values()
        return any(ours in place["name"] and place["state"] not in ("CREATED", "REMOVED") for place in places)

    def _is_running(self) -> bool:
        """Whether Serve has brought every replica to this version, so that none of an older one answers."""
        application = serve.status().applications.get(self._name)
        return application is not None and application.status == "RUNNING"

    def _await_health(self, plan: Plan) -> None:
        """The routes say 200 only when a token would come."""
        deadline, pause, answer = time.monotonic() + HEALTH_S, threading.Event(), ""
        while time.monotonic() < deadline:
            status, answer = _get(plan.host, plan.port, "/health")
            if status == 200 and self._is_running():
                return
            pause.wait(_LOOK_S)
        raise ServiceError(f"/health did not become ready within {HEALTH_S:.0f} s; its last answer: {answer}")


def _summary(heard: dict[str, str], groups: int) -> str:
    ready = sum(text == "ready" for text in heard.values())
    busy = [text for text in heard.values() if text != "ready"]
    count = f"{ready} of {groups} ready" if groups > 1 else ""
    return "starting groups: " + ", ".join(part for part in (count, busy[-1] if busy else "ready") if part)


def _nodes(*, free: bool = False) -> dict[str, dict[str, float]]:
    """Resources of each live node, all of them or the free ones."""
    available: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node() if free else {}
    nodes: dict[str, dict[str, float]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            resources = available.get(node["NodeID"], {}) if free else node["Resources"]
            nodes[str(node["NodeManagerAddress"])] = dict(resources)
    return nodes


def _deployment_faults(application: Any) -> str:
    faults = [deployment.message for deployment in application.deployments.values() if deployment.message]
    return "\n".join(faults) or application.message


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1" if host == "0.0.0.0" else host, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(2000).decode(errors="replace")
    except OSError as error:
        return 0, str(error)
    finally:
        connection.close()
