"""A deterministic cluster: one heap of (time, event), one seed. Real coordinator and request machines over engines.

Every call may be lost on its way or on its way back, come late or twice; groups crash and drain, ingresses die, the
coordinator restarts, clients leave, streams break. After every event the invariants hold; when all faults have
stopped, everything comes back to zero.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant
from cluster.coordination.ledger import Stage
from cluster.coordination.placement import Bounds
from cluster.requests.machine import RequestMachine, moves
from cluster.requests.work import Endurance, Work
from tests.shadow_engine import expected_output
from tests.simulated_group import SimulatedGroup
from tests.simulated_ingress import SimulatedIngress
from workers.errors import EngineRefused
from workers.plan import Finish, GroupDead
from workers.sequence import Priority, Sampling


@dataclass(frozen=True)
class Faults:
    """Probabilities per call, and mean seconds between faults of a kind (0: never)."""

    lost: float = 0.02
    late: float = 0.02
    twice: float = 0.02
    crash_s: float = 6.0
    drain_s: float = 20.0
    ingress_s: float = 15.0
    coordinator_s: float = 20.0
    break_s: float = 1.0
    leaves: float = 0.2


CALM = Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class World:
    """Everything, and the clock. `step()` runs one event and checks."""

    def __init__(self, seed: int, *, groups: int = 3, ingresses: int = 2, faults: Faults | None = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self.events = 0
        self.serial = itertools.count(1)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.coordinator_up = True
        self.coordinator_life = 0
        self.coordinator = self._new_coordinator()
        self.granted: dict[tuple[int, str, int], str] = {}
        self.accepted: set[tuple[str, int]] = set()
        self.closed: set[str] = set()
        self.ends: dict[str, str] = {}
        self.lost_with_ingress: set[str] = set()
        self.groups: dict[str, SimulatedGroup] = {}
        self.ingresses = [SimulatedIngress(self, f"i{next(self.serial)}") for _ in range(ingresses)]
        for number in range(groups):
            self.start_group(f"g{number}")
        self._schedule_faults()

    def _new_coordinator(self) -> Coordinator:
        bounds = Bounds(queue_requests=16, queue_tokens=4096)
        return Coordinator(bounds=bounds, grant_s=2.0, drop_s=8.0, first_epoch=1000 * self.coordinator_life)

    # -- time and network ---------------------------------------------------------------------------------------------

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), event))

    def step(self) -> None:
        self.now, _, event = heapq.heappop(self._heap)
        self.events += 1
        event()
        self.check()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.step()

    def delay(self) -> float:
        late = self.chance.random() < self.faults.late
        return self.chance.uniform(1.0, 5.0) if late else self.chance.uniform(0.001, 0.01)

    def call(
        self,
        work: Callable[[], object],
        answer: Callable[[object], None],
        lost: Callable[[], None],
        *,
        coordinator: bool = False,
    ) -> None:
        """Do `work` over there; then `answer` here, or `lost` if no answer came in time (it may still come)."""
        done = False

        def arrive() -> None:
            if coordinator and not self.coordinator_up:
                return
            result = work()
            if self.chance.random() >= self.faults.lost:
                self.after(self.delay(), lambda: back(result))

        def back(result: object) -> None:
            nonlocal done
            done = True
            answer(result)

        copies = 2 if self.chance.random() < self.faults.twice else 1
        for _ in range(copies):
            if self.chance.random() >= self.faults.lost:
                self.after(self.delay(), arrive)
        self.after(1.0, lambda: None if done else lost())

    # -- parts --------------------------------------------------------------------------------------------------------

    def start_group(self, name: str) -> None:
        group = SimulatedGroup(self, name)
        self.groups[group.address] = group
        group.join()
        self.after(0.1, group.report)

    def submit(self, group: SimulatedGroup, ingress: str, request: object) -> EngineRefused | GroupDead | None:
        """What the engine says to it."""
        if group.dead:
            return GroupDead("crashed")
        before = len(group.engine.accepted_keys)
        try:
            group.engine.submit(ingress, request)  # type: ignore[arg-type]
        except EngineRefused as refused:
            return refused
        for key, grant in group.engine.accepted_keys[before:]:
            assert key not in self.accepted, f"seed {self.seed}: {key} accepted twice"
            self.accepted.add(key)
            self._check_accepted(group, grant)
        group.poke()
        return None

    def _check_accepted(self, group: SimulatedGroup, grant: str) -> None:
        """What a group accepts is still committed: its blocks have not been given to somebody else."""
        known = self.coordinator._view.groups.get(group.engine.name)
        if known is not None and grant.startswith(f"{group.engine.name}/{known.epoch}/"):
            assert grant in known.ledger.open, f"seed {self.seed}: {grant} accepted after it was given back"

    def note_grant(self, life: int, grant: Grant) -> None:
        """No attempt ever holds two grants of one coordinator's life."""
        key = (life, grant.request, grant.attempt)
        assert self.granted.setdefault(key, grant.id) == grant.id, f"seed {self.seed}: {key} granted twice"

    def arrive(self) -> None:
        """A client comes to some ingress, and may leave before its end."""
        name, chance = f"r{next(self.serial)}", self.chance
        prompt = tuple(chance.randrange(100) for _ in range(chance.randrange(1, 120)))
        sampling = Sampling(chance.randrange(1, 120), seed=chance.randrange(9), stop_ids=frozenset({7}))
        work = Work(name, prompt, sampling, "m", b"n", chance.choice(tuple(Priority)))
        ingress = chance.choice([i for i in self.ingresses if not i.dead])
        machine = RequestMachine(work, Endurance(deaths=50, misses=50, patience_s=60.0, timeout_s=None))
        ingress.start(machine, expected_output(prompt, sampling))
        if chance.random() < self.faults.leaves:
            self.after(chance.choice((0.0, 0.005, 0.03, chance.uniform(0, 4))), lambda: ingress.leave(name))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        faults = self.faults
        for mean, fault in (
            (faults.crash_s, self._crash),
            (faults.drain_s, self._drain),
            (faults.ingress_s, self._kill_ingress),
            (faults.coordinator_s, self._restart_coordinator),
            (faults.break_s, self._break_stream),
        ):
            if mean:
                self._repeat(mean, fault)

    def _repeat(self, mean: float, fault: Callable[[], None]) -> None:
        def happen() -> None:
            if self.faults is not CALM:
                fault()
                self.after(self.chance.expovariate(1 / mean), happen)

        self.after(self.chance.expovariate(1 / mean), happen)

    def _alive(self) -> list[SimulatedGroup]:
        return [group for group in self.groups.values() if not group.dead and not group.leaving]

    def _crash(self) -> None:
        if alive := self._alive():
            group = self.chance.choice(alive)
            group.die()
            if self.chance.random() < 0.5 and self.coordinator_up:
                self.coordinator.leave(group.engine.name, group.engine.epoch, self.now)
            self.after(self.chance.uniform(0.5, 4.0), lambda: self.start_group(group.engine.name))

    def _drain(self) -> None:
        if alive := self._alive():
            group = self.chance.choice(alive)
            group.leaving = True
            group.engine.drain()
            if self.coordinator_up:
                self.coordinator.leave(group.engine.name, group.engine.epoch, self.now)
            self._retire(group, self.now + 20.0)

    def _retire(self, group: SimulatedGroup, latest: float) -> None:
        if not group.engine.idle and self.now < latest and not group.dead:
            self.after(0.5, lambda: self._retire(group, latest))
            return
        group.die()
        self.after(1.0, lambda: self.start_group(group.engine.name))

    def _kill_ingress(self) -> None:
        victim = self.chance.choice(self.ingresses)
        victim.die()
        self.ingresses.remove(victim)
        self.ingresses.append(SimulatedIngress(self, f"i{next(self.serial)}"))

    def _restart_coordinator(self) -> None:
        def back() -> None:
            self.coordinator_life += 1
            self.coordinator = self._new_coordinator()
            self.coordinator_up = True

        if self.coordinator_up:
            self.coordinator_up = False
            self.after(self.chance.uniform(0.2, 3.0), back)

    def _break_stream(self) -> None:
        streams = [stream for ingress in self.ingresses for stream in ingress.streams.values()]
        if streams:
            self.chance.choice(streams).break_off()

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every event: the ledgers add up, void and open agree, nothing is negative."""
        view, open_grants = self.coordinator._view, 0
        for group in view.groups.values():
            ledger = group.ledger
            blocks = fresh = void = 0
            for name, entry in ledger.open.items():
                blocks += entry.grant.blocks
                fresh += 0 if entry.seen else entry.ask.prompt_tokens
                void += entry.stage is Stage.VOID
                assert (entry.stage is Stage.VOID) == (name in ledger.void) and view.holders[name] is group, self.seed
            assert (blocks, fresh, void) == (ledger._blocks, ledger.fresh_tokens, len(ledger.void)), self.seed
            assert ledger.slots >= 0, self.seed
            open_grants += len(ledger.open)
        assert len(view.holders) == open_grants, self.seed

    def settle_down(self) -> None:
        """No more faults: all that was accepted ends, and everything is given back."""
        self.faults = CALM
        self.run(150.0)
        left = {name for ingress in self.ingresses for name in ingress.jobs}
        assert not left, f"seed {self.seed}: never ended: {left}"
        for group in self.groups.values():
            assert group.dead or (group.engine.idle and group.engine.held == 0), f"seed {self.seed}: {group.address}"
        for state in self.coordinator.groups(self.now):
            assert (state.committed, state.grants) == (0, 0), f"seed {self.seed}: {state}"
        assert {state.standing.value for state in self.coordinator.groups(self.now)} == {"up"}, self.seed
        assert not self.coordinator._view.latest and not self.coordinator._view.holders, self.seed


def end_name(end: moves.End) -> str:
    """How it ended, in one word."""
    if end.event is not None and end.event.finish is not None:
        return end.event.finish.value
    return end.refusal.code if end.refusal else "left"


FINISHED = (Finish.STOP.value, Finish.LENGTH.value)
