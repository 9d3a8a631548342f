"""One incarnation of a group in the simulation: an engine, its step loop, its reports and its death."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.coordination.cards import GroupCard
from tests.shadow_engine import ShadowEngine
from workers.plan import GroupDead

if TYPE_CHECKING:
    from tests.simulation import World


class SimulatedGroup:
    """Steps while there is work; reports about twice a second; joins again when the coordinator does not know it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.address = f"at-{name}-{next(world.serial)}"
        blocks = world.chance.choice((24, 48, 96))
        self.engine = ShadowEngine(name=name, epoch=0, blocks=blocks, max_num_seqs=world.chance.choice((2, 4, 8)))
        engine = self.engine
        self.card = GroupCard(name, ("m",), self.address, blocks, engine.block_size, engine.max_num_seqs, 256, 512)
        self.stepping = False
        self.void: tuple[str, ...] = ()
        self.leaving = False

    @property
    def dead(self) -> bool:
        return self.engine.dead is not None

    def join(self) -> None:
        if self.dead or self.leaving:
            return
        if self.world.coordinator_up:
            self.engine.epoch = self.world.coordinator.join(self.card, self.world.now)
        else:
            self.world.after(0.5, self.join)

    def poke(self) -> None:
        """There is work: step until there is none."""
        if not self.stepping and not self.dead:
            self.stepping = True
            self.world.after(self.world.chance.uniform(0.01, 0.04), self.step)

    def step(self) -> None:
        self.stepping = False
        if not self.dead and self.engine.turn(self.world.now):
            self.poke()

    def report(self) -> None:
        if self.dead:
            return
        self.engine.obey(None, self.void)
        answer = self.engine.report()
        self.engine.turn(self.world.now)  # leases lapse even when there is nothing to do
        self.poke()
        report, world = answer.result(), self.world
        world.call(lambda: world.coordinator.report(report, world.now), self._obey, lambda: None, coordinator=True)
        world.after(world.chance.uniform(0.4, 0.6), self.report)

    def _obey(self, reply: object) -> None:
        known, epoch, void = reply.known, reply.epoch, reply.void  # type: ignore[attr-defined]
        if known:
            self.void = void
        elif not epoch:
            self.join()

    def die(self) -> None:
        self.engine.dead = GroupDead("crashed")
        for subscriber in self.engine._subscribers.values():
            subscriber.outbox.close()
