"""Panel: a running service's settings and groups in an operator's hand: what is in force, and how to change it.

Finds the service as `tidegate status` does and speaks to its coordinator over Ray; opens nothing of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from cluster.coordination.control import Command, Revise, Rollback, UnknownGroup
from cluster.coordination.revisions import Edition, Revision, RevisionError
from cluster.registry import CoordinatorMissing, coordinator_services, find_coordinator
from deploy.app import folders_of, located, make_plan, run_dir
from deploy.changes import Change, Reach, beyond_live, differences
from deploy.cluster import RayLink
from deploy.config import ClusterConfig, ConfigError, Environment
from deploy.files import file_faults
from deploy.quality.gate import admitted
from deploy.service import Progress, Service, ServiceError
from deploy.settings import digest_of, door_settings, live_settings, source_of

ANSWER_S = 30.0
LOOK_S = 0.1
"""Between two looks at whether a change has arrived."""
_HARD = (Reach.NEW, Reach.ROLLING)


class Refused(ServiceError):
    """The service does not do what was asked; the message says why."""


class Panel:
    """One service, called `name`, on the Ray of `link`."""

    def __init__(self, link: RayLink, name: str) -> None:
        self.name = name
        self._link = link

    def revision(self) -> Revision:
        """The settings in force. ServiceError while the coordinator does not answer."""
        answer: Revision = self._ask("revision", "", -1, "")
        return answer

    def status(self) -> dict[str, Any]:
        """What `tidegate status` shows."""
        answer: dict[str, Any] = self._ask("status")
        return answer

    def carry_out(self, command: Command) -> Revision:
        """Raises Refused."""
        answer: Revision = self._ask("carry_out", command)
        return answer

    def changes(self, config: ClusterConfig) -> tuple[Change, ...]:
        """What would change if `config` were in force."""
        return _changes(self.revision().edition, config)

    def apply(self, config: ClusterConfig, say: Progress, *, rolling: bool = False, undo: bool = False) -> Revision:
        """Put `config` in force: at once, or by replacing groups one by one where its keys take that and `rolling`
        allows it. `undo`: it is the config before the one in force. Raises ConfigError with what stands in the way."""
        revision = self.revision()
        changes = _changes(revision.edition, config)
        if not changes:
            return revision
        _check_reach(changes, rolling)
        environment = Environment.read()
        if faults := file_faults(config, environment):
            raise ConfigError("\n".join(faults))
        if beyond_live(changes):
            return self._roll(config, revision, say, undo)
        before = revision.edition
        assert before.live.ingress is not None
        ingress = door_settings(config, before.live.ingress.models, environment)
        edition = Edition(digest_of(config), live_settings(config, ingress), source_of(config), before.built)
        return self.carry_out(Revise(edition, revision.number, undo))

    def rollback(self, say: Progress, *, rolling: bool = False) -> Revision:
        """Put the config before the one in force again in force. Raises Refused, ConfigError."""
        revision = self.revision()
        previous = self._ask("earlier")
        if previous is None:
            raise Refused(f"there is no revision before {revision.number} to return to")
        config = _config(previous.source)
        if not beyond_live(self.changes(config)):
            return self.carry_out(Rollback(revision.number))
        return self.apply(config, say, rolling=rolling, undo=True)

    def await_arrival(self, number: int, within_s: float) -> list[str]:
        """Wait until all groups and ingresses go by revision `number`; who does not by then, and why."""
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while missing := _missing(self.status(), number):
            if time.monotonic() > deadline:
                return missing
            pause.wait(LOOK_S)
        return []

    def await_group(self, group: str, epoch: int, *, restart: bool, within_s: float) -> str:
        """Wait until `group`, which is to be emptied, is (or has been built anew since `epoch`): how it stands then."""
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while True:
            status = self.status()
            word = status["maintenance"].get(group, "")
            row = next((row for row in status["groups"] if row["group"] == group), None)
            if word == "drained" or (restart and row and row["epoch"] > epoch and row["settings"]):
                return "built anew" if restart else word
            if time.monotonic() > deadline:
                raise Refused(f"{group} is still {word or 'not back'} after {within_s:.0f} s; see `tidegate status`")
            pause.wait(LOOK_S)

    def _roll(self, config: ClusterConfig, revision: Revision, say: Progress, undo: bool) -> Revision:
        folders = folders_of(config, say)
        identity = self._ask("identity").config
        plan = make_plan(admitted(config, folders, say), *folders, identity=identity, asked=config)
        Service(self._link, self.name, run_dir()).update(plan, say, base=revision.number, undo=undo)
        return self.revision()

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            coordinator: ActorHandle = find_coordinator(self.name)
            return ray.get(getattr(coordinator, method).remote(*arguments), timeout=ANSWER_S)
        except RayTaskError as error:
            if isinstance(error.cause, RevisionError | UnknownGroup):
                raise Refused(str(error.cause)) from error
            raise
        except (CoordinatorMissing, RayError, TimeoutError) as error:
            raise ServiceError(f"the coordinator of {self.name} does not answer: {error}") from error


@contextmanager
def panel(address: str | None = None, service: str | None = None) -> Iterator[Panel]:
    """The panel of `service` (None: the only one) on the Ray at `address`, else of the one that runs on this machine.
    ServiceError when none is found."""
    link, service, _ = located(address, service)
    try:
        names = [service] if service else coordinator_services()
        if len(names) != 1:
            found = f"several services run there: {', '.join(names)}; name one" if names else "no service runs there"
            raise ServiceError(f"{found} (Ray at {link.address})")
        yield Panel(replace(link, folder=None), names[0])
    finally:
        ray.shutdown()


def _changes(edition: Edition, config: ClusterConfig) -> tuple[Change, ...]:
    return differences(_config(edition.source), config, _config(edition.built))


def _check_reach(changes: tuple[Change, ...], rolling: bool) -> None:
    lines = {reach: [str(change) for change in changes if change.reach is reach] for reach in Reach}
    fresh, one_by_one = ([f"  {line}" for line in lines[reach]] for reach in _HARD)
    if fresh:
        hint = "these keys take a new cluster: end the service and start it with this config"
        raise ConfigError("\n".join([hint, *fresh]))
    if one_by_one and not rolling:
        hint = "these keys take new groups: `--rolling` replaces them one by one, running requests go on elsewhere"
        raise ConfigError("\n".join([hint, *one_by_one]))


def _missing(status: dict[str, Any], number: int) -> list[str]:
    staying = [row for row in status["groups"] if row["state"] != "leaving"]
    groups = [f"group {row['group']}" for row in staying if row["settings"] != number]
    late = [row for row in status["ingress_settings"] if row["revision"] != number or row["fault"]]
    if not status["ingress_settings"]:
        return ["the ingresses, which the coordinator has not heard yet"]
    return groups + [f"ingress {row['ingress']}" + (f": {row['fault']}" if row["fault"] else "") for row in late]


def _config(source: str) -> ClusterConfig:
    return ClusterConfig.model_validate_json(source or "{}")
