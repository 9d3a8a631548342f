"""A scheduler over shadow ranks whose clock and steps a test moves."""

from __future__ import annotations

from kvstore.store import KVStore
from tests.shadow import ShadowGroup
from workers.plan import Limits, StepPlan, TokenEvent
from workers.scheduler import Scheduler
from workers.sequence import Priority, Request, Sampling


class Bench:
    """A scheduler, its shadow ranks and a clock that a test moves."""

    def __init__(self, blocks: int = 32, *, seqs: int = 8, budget: int = 64, chunk: int = 64, watermark: float = 0.0):
        self.store = KVStore(blocks, 4)
        self.scheduler = Scheduler(self.store, Limits(seqs, budget, chunk), max_model_len=1000, watermark=watermark)
        self.group = ShadowGroup(blocks, 4)
        self.now = 0.0
        self.events: list[TokenEvent] = []

    def add(
        self,
        name: str,
        prompt: int,
        output: int = 4,
        priority: Priority = Priority.INTERACTIVE,
        base: int = 0,
        left: float | None = None,
    ) -> None:
        tokens = tuple(range(base, base + prompt))
        self.now += 0.001
        self.scheduler.add(Request(name, tokens, Sampling(output), b"n", priority=priority, left=left), self.now)

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.events += self.scheduler.apply(self.group.wait(self.group.launch(plan)), self.now)
            self.store.check()
        return plan

    def finish(self) -> None:
        for _ in range(500):
            if self.step() is None:
                return
        raise AssertionError("no end in sight")

    def running(self) -> list[str]:
        return sorted(s.request.id for s in self.scheduler.running)

    def ended(self) -> list[str]:
        return [event.request for event in self.events if event.finish is not None]
