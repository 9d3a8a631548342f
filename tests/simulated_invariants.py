"""What must hold in the simulation after every event, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.coordination.grants import Grant
from cluster.coordination.ladder import Level
from cluster.coordination.ledger import Stage
from workers.plan import GroupReport

if TYPE_CHECKING:
    from tests.simulated_group import SimulatedGroup
    from tests.simulation import World

EVERY = 16
"""The dear checks are made at every so manieth event."""


class Invariants:
    """Reads the parts of `world`, changes nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._granted: dict[tuple[int, str, int], str] = {}
        self.accepted: set[tuple[str, int]] = set()
        self.closed: set[str] = set()
        self.levels: dict[tuple[int, str, int], tuple[Level, float]] = {}
        self.moves = 0
        self.shortages = 0
        self._random_deaths = bool(world.faults.crash_s or world.faults.hang_s)

    def _holds(self, condition: bool, what: object = "") -> None:
        assert condition, f"seed {self._world.seed} at {self._world.now:.3f}: {what}"

    # -- what happens -------------------------------------------------------------------------------------------------

    def note_grant(self, grant: Grant) -> None:
        """No attempt ever holds two grants of one coordinator's life."""
        key = (self._world.coordinator_life, grant.request, grant.attempt)
        self._holds(self._granted.setdefault(key, grant.id) == grant.id, f"{key} granted twice")

    def note_accepted(self, group: SimulatedGroup, key: tuple[str, int], grant: str) -> None:
        """An attempt is accepted once; what a group accepts is still committed: nobody else was given its blocks."""
        self._holds(key not in self.accepted, f"{key} accepted twice")
        self.accepted.add(key)
        if not grant:
            self._world.grantless.add(key)
            return
        known = self._world.coordinator._view.groups.get(group.engine.name)
        if known is not None and grant.startswith(f"{group.engine.name}/{known.epoch}/"):
            self._holds(grant in known.ledger.open, f"{grant} accepted after it was given back")

    def note_closed(self, grant: str) -> None:
        """A grant is settled or withdrawn once."""
        self._holds(grant not in self.closed, f"grant {grant} closed twice")
        self.closed.add(grant)

    def note_report(self, report: GroupReport) -> None:
        pool = report.pool
        self.shortages = max(self.shortages, report.ooms)
        self._holds(pool.free + pool.held + pool.idle + pool.dirty == pool.total, pool)
        self._holds(report.leaked == 0, "leaked blocks")

    # -- after every event --------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._world.events % EVERY:
            return
        self._check_ledgers()
        self._check_levels()
        self._check_line()

    def _check_ledgers(self) -> None:
        """They add up, void and open agree, nothing is negative."""
        view, open_grants = self._world.coordinator._view, 0
        for group in view.groups.values():
            ledger = group.ledger
            blocks = void = 0
            for name, entry in ledger.open.items():
                blocks += entry.grant.blocks
                void += entry.stage is Stage.VOID
                self._holds((entry.stage is Stage.VOID) == (name in ledger.void) and view.holders[name] is group, name)
            self._holds(void == len(ledger.void), "void grants")
            self._holds(ledger.slots >= 0 and ledger.committed >= 0, "negative commitment")
            open_grants += len(ledger.open)
        self._holds(len(view.holders) == open_grants, "grants without a holder")

    def _check_levels(self) -> None:
        """A group's level moves one row at a time, and not before its dwell is over."""
        world = self._world
        terms = world._terms.ladder
        for group in world.coordinator._view.groups.values():
            key = (world.coordinator_life, *group.incarnation)
            level = group.ladder.level
            before, since = self.levels.get(key, (Level.NORMAL, float("-inf")))
            if level is before:
                continue
            self.moves += 1
            self._holds(abs(level.row - before.row) == 1, f"{before} to {level}")
            dwell = terms.dwell_up_s if level > before else terms.dwell_down_s
            slack = 0.5  # events between the move and this look
            self._holds(world.now - since >= dwell - slack, f"{before} to {level} after {world.now - since:.2f} s")
            self.levels[key] = (level, world.now)

    def _check_line(self) -> None:
        """Its counters equal a recount, and its bounds hold but for replays."""
        self._world.coordinator.check()

    # -- at the end ---------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        world = self._world
        left = {name for ingress in world.ingresses for name in ingress.jobs}
        self._holds(not left, f"never ended: {left}")
        for group in world.groups.values():
            self._holds(group.dead or (group.engine.idle and group.engine.held == 0), group.address)
            if not group.dead:
                group.engine.store.check()
        states: Any = world.coordinator.groups(world.now)
        for state in states:
            self._holds((state.committed, state.grants) == (0, 0), state)
        self._holds({state.standing.value for state in states} == {"up"}, states)
        view = world.coordinator._view
        self._holds(not view.latest and not view.holders, "requests that the coordinator remembers")
        self._holds(world.coordinator.waiting == 0, "somebody waits in the line")
        for name, end in world.ends.items():
            if name in world.poisonous:
                self._holds(end not in ("stop", "length"), f"{name} was poison and finished")
            elif not self._random_deaths:  # three of those, one of them alone, look like poison
                self._holds(end != "poisoned_request", f"{name} was no poison")
