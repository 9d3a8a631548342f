"""What goes wrong in the simulation, how often, and how it is done to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated_group import SimulatedGroup
    from tests.simulation import World

STEP_TIMEOUT_S = 3.0
"""After so long without a step the owner ends a group that hangs."""


@dataclass(frozen=True)
class Faults:
    """Probabilities per call or request, and mean seconds between faults of a kind (0: never)."""

    lost: float = 0.02
    late: float = 0.02
    twice: float = 0.02
    crash_s: float = 6.0
    hang_s: float = 20.0
    drain_s: float = 20.0
    ingress_s: float = 15.0
    coordinator_s: float = 20.0
    break_s: float = 1.0
    forget_s: float = 2.0
    leaves: float = 0.2
    short: float = 0.02
    poison: float = 0.01
    deadlines: bool = True


CALM = Faults(
    lost=0.0,
    late=0.0,
    twice=0.0,
    crash_s=0.0,
    hang_s=0.0,
    drain_s=0.0,
    ingress_s=0.0,
    coordinator_s=0.0,
    break_s=0.0,
    forget_s=0.0,
    leaves=0.0,
    short=0.0,
    poison=0.0,
    deadlines=False,
)


class Trouble:
    """Lets the faults of `world.faults` happen at random times until they are CALM."""

    def __init__(self, world: World) -> None:
        self._world = world
        faults = world.faults
        for mean, fault in (
            (faults.crash_s, self._crash),
            (faults.hang_s, self._hang),
            (faults.drain_s, self._drain),
            (faults.ingress_s, self._kill_ingress),
            (faults.coordinator_s, self._stop_coordinator),
            (faults.break_s, self._break_stream),
            (faults.forget_s, self._forget_session),
        ):
            if mean:
                self._repeat(mean, fault)

    def end_group(self, group: SimulatedGroup) -> None:
        """A group has died; its owner builds another, and may manage to say so first."""
        world = self._world
        group.die()
        if world.chance.random() < 0.5:
            world.reach(lambda coordinator: coordinator.leave(group.engine.name, group.engine.epoch, world.now))
        world.after(world.chance.uniform(0.5, 4.0), lambda: world.start_group(group.engine.name))

    def _repeat(self, mean: float, fault: Callable[[], None]) -> None:
        world = self._world

        def happen() -> None:
            if world.faults is not CALM:
                fault()
                world.after(world.chance.expovariate(1 / mean), happen)

        world.after(world.chance.expovariate(1 / mean), happen)

    def _alive(self) -> list[SimulatedGroup]:
        return [group for group in self._world.groups.values() if not group.dead and not group.leaving]

    def _crash(self) -> None:
        if alive := self._alive():
            self.end_group(self._world.chance.choice(alive))

    def _hang(self) -> None:
        """Neither steps nor reports; the owner's patience ends it."""
        if alive := self._alive():
            group = self._world.chance.choice(alive)
            group.hanging = True
            self._world.after(STEP_TIMEOUT_S, lambda: None if group.dead else self.end_group(group))

    def _drain(self) -> None:
        if alive := self._alive():
            world, group = self._world, self._world.chance.choice(alive)
            group.leaving = True
            group.engine.drain()
            world.reach(lambda coordinator: coordinator.leave(group.engine.name, group.engine.epoch, world.now))
            self._retire(group, world.now + 20.0)

    def _retire(self, group: SimulatedGroup, latest: float) -> None:
        world = self._world
        if group.dead:
            return  # crashed meanwhile: whoever saw that builds the next
        if not group.engine.idle and world.now < latest:
            world.after(0.5, lambda: self._retire(group, latest))
            return
        group.die()
        world.after(1.0, lambda: world.start_group(group.engine.name))

    def _kill_ingress(self) -> None:
        from tests.simulated_ingress import SimulatedIngress

        world = self._world
        victim = world.chance.choice(world.ingresses)
        victim.die()
        world.ingresses.remove(victim)
        world.ingresses.append(SimulatedIngress(world, f"i{next(world.serial)}"))

    def _stop_coordinator(self) -> None:
        world = self._world
        if world.coordinator_up:
            world.coordinator_up = False
            world.after(world.chance.uniform(0.2, 3.0), world.restart_coordinator)

    def _forget_session(self) -> None:
        """A client has its session forgotten."""
        namespace = self._world.any_namespace()
        for group in self._alive():
            group.engine.purge(namespace)
            group.poke()

    def _break_stream(self) -> None:
        streams = [stream for ingress in self._world.ingresses for stream in ingress.streams.values()]
        if streams:
            self._world.chance.choice(streams).break_off()
