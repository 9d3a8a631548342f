"""One incarnation of a group in the simulation: an engine, its step loop, its reports and its death."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.coordination.cards import GroupCard, Reply
from kvstore.table import GONE
from tests.shadow_engine import ShadowEngine
from workers.plan import GroupDead, StepPlan, StepResult

if TYPE_CHECKING:
    from tests.simulation import World

POISON = 1000
"""A token that no group survives."""


class Watched:
    """The shadow ranks of an engine, watched from outside the store: who wrote a block may read it, and whoever has the
    public namespace's prompt; and a plan with POISON ends the group."""

    def __init__(self, engine: ShadowEngine, seed: int) -> None:
        self._engine = engine
        self._ranks: Any = engine._group
        self._owner: dict[int, bytes] = {}
        self._seed = seed

    def launch(self, plan: StepPlan) -> object:
        if any(POISON in row.tokens for row in plan.rows):
            raise GroupDead("a token was poison")
        self._look(plan)
        return self._ranks.launch(plan)

    def wait(self, handle: object) -> StepResult:
        result: StepResult = self._ranks.wait(handle)
        return result

    def _look(self, plan: StepPlan) -> None:
        for source, target in plan.copy:
            self._owner[target] = self._owner.get(source, b"")
        for block in plan.zero:
            self._owner.pop(block, None)
        size = self._engine.block_size
        parts = self._engine._scheduler._inflight[-1].parts
        for row, part in zip(plan.rows, parts, strict=True):
            request = part.sequence.request
            shared = request.terms.public_tokens // size
            for table in row.tables:
                for place, block in enumerate(table):
                    if block == GONE:
                        continue
                    own = request.terms.public if place < shared else request.namespace
                    if (place + 1) * size <= row.start:
                        assert self._owner[block] == own, f"seed {self._seed}: a block is read across namespaces"
                    elif place * size >= row.start:
                        self._owner[block] = own


class SimulatedGroup:
    """Steps while there is work; reports when the coordinator's last reply says so; joins again when it is unknown."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.address = f"at-{name}-{next(world.serial)}"
        chance = world.chance
        blocks = chance.choice((24, 48, 96))
        self.engine = ShadowEngine(
            name=name,
            epoch=0,
            blocks=blocks,
            max_num_seqs=chance.choice((2, 4, 8)),
            ttl=chance.choice((5.0, 60.0)),
            depth=chance.choice((1, 2)),
            short=lambda plan: plan.tokens > 1 and chance.random() < world.faults.short,
        )
        engine = self.engine
        engine._group = Watched(engine, world.seed)
        self.card = GroupCard(name, ("m",), self.address, blocks, engine.block_size, engine.max_num_seqs, 256, 512)
        self.stepping = False
        self.reply = Reply(True, 0)
        self.leaving = False
        self.hanging = False

    @property
    def dead(self) -> bool:
        return self.engine.dead is not None

    def join(self) -> None:
        if self.dead or self.leaving:
            return
        if self.world.coordinator_up:
            self.world.reach(lambda coordinator: self.engine.enter(coordinator.join(self.card, self.world.now)))
        else:
            self.world.after(0.5, self.join)

    def poke(self) -> None:
        """There is work: step until there is none."""
        if not self.stepping and not self.dead:
            self.stepping = True
            self.world.after(self.world.chance.uniform(0.01, 0.04), self.step)

    def step(self) -> None:
        self.stepping = False
        if not self.dead and not self.hanging and self._turn():
            self.poke()

    def report(self) -> None:
        if self.dead or self.hanging:
            return
        self.engine.obey(self.reply.limits, self.reply.void)
        answer = self.engine.report()
        if not self._turn():  # leases lapse even when there is nothing to do
            self.poke()
        if self.dead:
            return
        self.poke()
        report, world = answer.result(), self.world
        world.invariants.note_report(report)
        world.ask_coordinator(lambda coordinator: coordinator.report(report, world.now), self._obey, lambda: None)
        world.after(self.reply.beat_s * world.chance.uniform(0.8, 1.2), self.report)

    def _turn(self) -> bool:
        try:
            return self.engine.turn(self.world.now)
        except GroupDead:
            self.world.trouble.end_group(self)
            return False

    def _obey(self, reply: Reply) -> None:
        if reply.known:
            self.reply = reply
        elif not reply.epoch:
            self.join()

    def die(self) -> None:
        self.engine.dead = self.engine.dead or GroupDead("crashed")
        for outbox in self.engine._subscribers.outboxes:
            outbox.close()
