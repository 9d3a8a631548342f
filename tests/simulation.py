"""A deterministic cluster: one heap of (time, event), one seed. The real coordinator with its line and ladder and the
real request machines, over real engines on shadow ranks.

Every call may be lost on its way or on its way back, come late or twice; groups crash, hang, run out of memory and
drain, a request may kill its group, ingresses die, the coordinator restarts, clients leave, streams break. After every
event the invariants hold; when all faults have stopped, everything comes back to zero.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant, Refusal, Share, Ticket
from cluster.coordination.terms import Bounds, CoordinatorTerms, LineBounds, Thresholds
from cluster.requests.machine import RequestMachine, moves
from cluster.requests.work import Endurance, Work
from kvstore.chain import derive_namespace
from kvstore.sessions import Terms
from tests.shadow_engine import expected_output
from tests.simulated_faults import CALM, Faults, Trouble
from tests.simulated_group import POISON, SimulatedGroup
from tests.simulated_ingress import SimulatedIngress
from tests.simulated_invariants import Invariants
from workers.errors import EngineRefused
from workers.plan import Finish, GroupDead, Penalties
from workers.sequence import Priority, Sampling

FINISHED = (Finish.STOP.value, Finish.LENGTH.value)
TENANTS = (Share("a", 1.0, 20), Share("b", 2.0, 20), Share("c", 4.0, 20))
PUBLIC = derive_namespace(b"secret", "public")
SESSIONS = 3
PUBLIC_PROMPT = tuple(range(40, 40 + 48))
TERMS = CoordinatorTerms(
    Bounds(drop_s=8.0, grant_s=2.0),
    LineBounds(requests=24, tokens=4096, aging_s=5.0, batch_s=15.0, bypasses=8, bypass_s=2.0, ingress_s=6.0),
    Thresholds(dwell_up_s=0.5, dwell_down_s=2.0),
)
TICK_S = 0.25


class World:
    """Everything, and the clock. `step()` runs one event and checks. `shared_head`: how likely a prompt begins with a
    registered public one; `poison`: how likely a request kills the group that runs it."""

    def __init__(
        self,
        seed: int,
        *,
        groups: int = 3,
        ingresses: int = 2,
        faults: Faults | None = None,
        terms: CoordinatorTerms = TERMS,
        shared_head: float = 0.2,
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self.events = 0
        self.serial = itertools.count(1)
        self._terms = terms
        self._shared_head = shared_head
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.coordinator_up = True
        self.coordinator_life = 0
        self.coordinator = self._new_coordinator()
        self.poisonous: set[str] = set()
        self.ends: dict[str, str] = {}
        self.waited: dict[Priority, list[float]] = {priority: [] for priority in Priority}
        self.grantless: set[tuple[str, int]] = set()
        self.lost_with_ingress: set[str] = set()
        self.groups: dict[str, SimulatedGroup] = {}
        self.invariants = Invariants(self)
        self.trouble = Trouble(self)
        self.ingresses = [SimulatedIngress(self, f"i{next(self.serial)}") for _ in range(ingresses)]
        for number in range(groups):
            self.start_group(f"g{number}")
        self.after(TICK_S, self._tick)

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(self._terms, first_epoch=1000 * self.coordinator_life, seed=self.seed)

    # -- time and network ---------------------------------------------------------------------------------------------

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), event))

    def step(self) -> None:
        self.now, _, event = heapq.heappop(self._heap)
        self.events += 1
        event()
        self.invariants.check()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.step()

    def delay(self) -> float:
        late = self.chance.random() < self.faults.late
        return self.chance.uniform(1.0, 5.0) if late else self.chance.uniform(0.001, 0.01)

    def call(self, work: Callable[[], object], answer: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """Do `work` over there; then `answer` here, or `lost` if no answer came in time (it may still come)."""
        done = False

        def arrive() -> None:
            result = work()
            if result is not _NOBODY and self.chance.random() >= self.faults.lost:
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

    def ask_coordinator(
        self, work: Callable[[Coordinator], object], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        """A call to the coordinator of the moment at which it arrives."""
        self.call(lambda: self.reach(work), answer, lost)

    def reach(self, work: Callable[[Coordinator], object]) -> object:
        """`work` on the coordinator, if it is up; then whoever has news is woken."""
        if not self.coordinator_up:
            return _NOBODY
        result = work(self.coordinator)
        for name in self.coordinator.wakes():
            for ingress in self.ingresses:
                if ingress.name == name:
                    ingress.wake()
        return result

    def _tick(self) -> None:
        self.reach(lambda coordinator: coordinator.tick(self.now))
        self.after(TICK_S, self._tick)

    # -- parts --------------------------------------------------------------------------------------------------------

    def start_group(self, name: str) -> None:
        group = SimulatedGroup(self, name)
        self.groups[group.address] = group
        group.join()
        self.after(0.1, group.report)

    def restart_coordinator(self) -> None:
        self.coordinator_life += 1
        self.coordinator = self._new_coordinator()
        self.coordinator_up = True

    def submit(self, group: SimulatedGroup, ingress: str, request: Any) -> EngineRefused | GroupDead | None:
        """What the engine says to it."""
        if group.dead:
            return GroupDead("crashed")
        before = len(group.engine.accepted_keys)
        try:
            group.engine.submit(ingress, request)
        except EngineRefused as refused:
            return refused
        for key, grant in group.engine.accepted_keys[before:]:
            self.invariants.note_accepted(group, key, grant)
        group.poke()
        return None

    def arrive(self, **fixed: Any) -> None:
        """A client comes to some ingress, and may leave before its end."""
        name, chance = f"r{next(self.serial)}", self.chance
        tenant, session = chance.choice(TENANTS), chance.randrange(SESSIONS)
        prompt = tuple(chance.randrange(100) for _ in range(chance.randrange(1, 120)))
        terms = Terms(
            tenant.tenant.encode(), session_blocks=chance.choice((None, 4)), keep_s=chance.choice((0.0, 20.0))
        )
        if chance.random() < self._shared_head:
            prompt = PUBLIC_PROMPT + prompt[:40]
            terms = Terms(tenant.tenant.encode(), public=PUBLIC, public_tokens=len(PUBLIC_PROMPT))
        if chance.random() < self.faults.poison:
            prompt = (*prompt, POISON)
            self.poisonous.add(name)
        most = 0 if chance.random() < 0.05 else chance.randrange(1, 120)  # 0 fills the cache only
        sampling = Sampling(most, seed=chance.randrange(9), stop_ids=frozenset({7}))
        if len(prompt) % 3 == 0:
            sampling = replace(sampling, logprobs=2, prompt_logprobs=None if most % 2 else 1)
        if len(prompt) % 4 == 0:
            sampling = replace(sampling, penalties=Penalties(frequency=0.5, repetition=1.5, min_tokens=most // 2))
        work = Work(
            id=name,
            prompt=prompt,
            sampling=sampling,
            model="m",
            namespace=namespace_of(tenant, session),
            priority=fixed.get("priority") or chance.choice(tuple(Priority)),
            share=tenant,
            urgency=chance.choice((0, 0, 0, -1, 2)),
            timeout_s=chance.choice((None, None, None, 10.0, 30.0)) if self.faults.deadlines else None,
            terms=terms,
            affinity=(derive_namespace(b"secret", "affinity", tenant.tenant, session),),
        )
        ingress = chance.choice([i for i in self.ingresses if not i.dead])
        machine = RequestMachine(work, Endurance(misses=50, patience_s=60.0, timeout_s=None))
        expected = ((), Finish.ERROR) if name in self.poisonous else expected_output(prompt, sampling)
        ingress.start(machine, expected)
        if chance.random() < self.faults.leaves:
            self.after(chance.choice((0.0, 0.005, 0.03, chance.uniform(0, 4))), lambda: ingress.leave(name))

    def any_namespace(self) -> bytes:
        """That of some tenant's session."""
        return namespace_of(self.chance.choice(TENANTS), self.chance.randrange(SESSIONS))

    def note_answer(self, answer: Grant | Ticket | Refusal) -> None:
        """The coordinator has said this, whether or not it arrives."""
        if isinstance(answer, Grant):
            self.invariants.note_grant(answer)

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle_down(self) -> None:
        """No more faults: all that was accepted ends, and everything is given back."""
        self.faults = CALM
        self.run(200.0)
        self.invariants.check_end()

    def tally(self) -> Counter[str]:
        """How many ended how."""
        return Counter(self.ends.values())


_NOBODY = object()


def namespace_of(tenant: Share, session: int) -> bytes:
    """Where a session's prompts are cached."""
    return derive_namespace(b"secret", "session", tenant.tenant, session)


def end_name(end: moves.End) -> str:
    """How it ended, in one word."""
    if end.event is not None and end.event.finish is not None:
        return end.event.finish.value
    return end.refusal.code if end.refusal else "left"
