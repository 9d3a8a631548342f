"""Seeded sequences of calls to one coordinator, in any order, some lost or repeated, with what must hold after each.

Groups take what they are granted and end it when they like, reports come late or never, ingresses come and go.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Outcome, Refusal, Share, Ticket
from cluster.coordination.terms import Bounds, CoordinatorTerms, LineBounds
from kvstore.store import PoolReport
from tests.coordination import card
from workers.plan import Finish, GroupReport
from workers.sequence import Priority

TERMS = CoordinatorTerms(
    Bounds(grant_s=2.0, drop_s=8.0, forget_s=5.0),
    LineBounds(requests=30, tokens=3000, aging_s=3.0, batch_s=8.0, bypasses=4, bypass_s=1.5, ingress_s=4.0),
)
TENANTS = (Share("a", 1.0, 10), Share("b", 2.0, 10), Share("c", 4.0, 30))


@dataclass(eq=False)
class Group:
    """What a real one would do with grants: take each once, none that it was told is void."""

    name: str
    epoch: int
    blocks: int
    slots: int
    live: dict[str, Grant] = field(default_factory=dict)
    void: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    accepted: list[str] = field(default_factory=list)
    voided: list[str] = field(default_factory=list)
    sequence: int = 0

    def report(self, chance: random.Random) -> GroupReport:
        self.sequence += 1
        held = min(self.blocks, sum(grant.blocks for grant in self.live.values()))
        pool = PoolReport(self.blocks, self.blocks - held, held, 0, 0, 16)
        told = GroupReport(
            self.name,
            self.epoch,
            self.sequence,
            self.sequence,
            pool,
            committed=max(held - chance.randrange(2), 0) if chance.random() < 0.8 or not held else held + 5,
            running=min(len(self.live), self.slots),
            waiting=max(0, len(self.live) - self.slots),
            waiting_tokens=0,
            accepted=tuple(self.accepted),
            voided=tuple(self.voided),
            live=tuple(self.live),
            sessions=((chance.choice((b"x", b"y")), chance.randrange(3), 5.0),),
        )
        self.accepted, self.voided = [], []
        return told


class Driver:
    """`tickets` are those (request, attempt) that wait, as far as their ingress was told."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance, self.now = seed, random.Random(seed), 0.0
        self.coordinator = Coordinator(TERMS, first_epoch=1, seed=seed)
        self.groups: dict[str, Group] = {}
        self.acked: Counter[str] = Counter()
        self.asks: dict[str, tuple[str, Ask]] = {}  # request -> ingress and its latest ask
        self.tickets: set[tuple[str, int]] = set()
        self.ends: Counter[tuple[str, int]] = Counter()
        self.grants: dict[str, Grant] = {}
        self.by_attempt: dict[tuple[str, int], str] = {}
        self.lost: set[tuple[str, int]] = set()
        self.touched: dict[str, float] = {}
        self.serial = 0
        self.seen: Counter[str] = Counter()
        for name in "ab":
            self.join(name)

    # -- groups -------------------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        blocks, slots = self.chance.choice((10, 20, 40)), self.chance.choice((2, 4, 8))
        epoch = self.coordinator.join(card(name, blocks=blocks, max_num_seqs=slots), self.now)
        self.groups[name] = Group(name, epoch, blocks, slots)

    def report(self, *, heard: bool = True) -> None:
        if self.groups:
            group = self.chance.choice(list(self.groups.values()))
            told = group.report(self.chance)
            if heard:
                reply = self.coordinator.report(told, self.now)
                if not reply.known:
                    return self.join(group.name)
                if self.chance.random() < 0.9:
                    for name in set(reply.void) - set(group.live):
                        group.void.add(name)
                        group.voided.append(name)

    def take(self, grant: Grant) -> None:
        """Its ingress submits a grant; the group accepts it once, if it is still good there."""
        group = self.groups.get(grant.group)
        if group is None or group.epoch != grant.epoch or grant.id in group.void or grant.id in group.taken:
            self.coordinator.withdraw([grant.id], self.now)
            return
        entry = self.coordinator._view.entry(grant.id)
        assert entry is not None, f"seed {self.seed}: {grant.id} is accepted after its blocks were given back"
        group.taken.add(grant.id)
        group.live[grant.id] = grant
        group.accepted.append(grant.id)

    def finish(self) -> None:
        running = [(group, grant) for group in self.groups.values() for grant in group.live.values()]
        if running:
            group, grant = self.chance.choice(running)
            del group.live[grant.id]
            how = self.chance.choice((Finish.STOP, Finish.LENGTH, Finish.ABORT))
            if self.chance.random() < 0.9:
                self.coordinator.settle([Outcome(grant.id, how, 10, 0, self.chance.randrange(40))], self.now)

    def crash(self) -> None:
        name = self.chance.choice("abc")
        group = self.groups.pop(name, None)
        if group is not None and self.chance.random() < 0.5:
            self.coordinator.leave(name, group.epoch, self.now)
        elif group is None:
            self.join(name)

    # -- requests -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self.serial += 1
        chance = self.chance
        one = Ask(
            f"r{self.serial}",
            0,
            "m",
            b"x",
            chance.randrange(1, 150),
            chance.randrange(0, 60),
            priority=chance.choice(tuple(Priority)),
            share=chance.choice(TENANTS),
            urgency=chance.randrange(-1, 2),
            left=chance.choice((None, None, 3.0, 20.0)),
            alone=chance.random() < 0.03,
            affinity=(chance.choice((b"s", b"t", b"u")),),
        )
        self.ask(chance.choice("ij"), one)

    def again(self) -> None:
        """The same ask once more, or a new attempt, of a request that has not been forgotten yet."""
        fresh = [name for name, at in self.touched.items() if self.now - at < TERMS.bounds.forget_s - 0.5]
        if names := sorted({*fresh, *(name for name, _ in self.tickets)}):
            ingress, one = self.asks[self.chance.choice(names)]
            attempt = one.attempt + self.chance.choice((0, 0, 1, -1))
            if attempt >= 0:
                fields = {name: getattr(one, name) for name in one.__slots__}
                self.ask(ingress, Ask(**fields | {"attempt": attempt, "replay": attempt > 0}))

    def ask(self, ingress: str, one: Ask) -> None:
        newest = one.attempt >= self.asks[one.request][1].attempt if one.request in self.asks else True
        (found,) = self.coordinator.place(ingress, [one], self.now)
        if not isinstance(found, Refusal):
            self.touched[one.request] = self.now
        key = (one.request, one.attempt)
        if newest:
            older = {ticket for ticket in self.tickets if ticket[0] == one.request and ticket[1] < one.attempt}
            for ticket in older:
                self.tickets.discard(ticket)
                self.ends[ticket] += 1
            self.asks[one.request] = (ingress, one)
        if isinstance(found, Ticket):
            self.tickets.add(key)
            self.ends.pop(key, None)
        else:
            self.answer(found)

    def answer(self, found: Grant | Refusal) -> None:
        key = (found.request, found.attempt)
        self.seen[found.code if isinstance(found, Refusal) else "grant"] += 1
        self.tickets.discard(key)
        if isinstance(found, Grant):
            assert self.by_attempt.setdefault(key, found.id) == found.id, f"seed {self.seed}: {key} granted twice"
            if found.id not in self.grants and self.chance.random() < 0.9:
                self.take(found)
            self.grants[found.id] = found

    def news(self) -> None:
        ingress = self.chance.choice("ij")
        told = self.coordinator.news(ingress, self.acked[ingress], self.now)
        if told.life != 1:
            # Its places are lost: it forgets them, as a request that asks again would.
            for key in [key for key in self.tickets if self.asks[key[0]][0] == ingress]:
                waiter = self.coordinator._dispatch.waiting.get(key[0])
                if waiter is None or waiter.ask.attempt != key[1]:
                    self.tickets.discard(key)
        if self.chance.random() < 0.8:
            for found in told.answers:
                if (found.request, found.attempt) in self.tickets:
                    self.ends[found.request, found.attempt] += 1
                self.answer(found)
            self.acked[ingress] = told.number

    def leave(self) -> None:
        if self.tickets:
            key = self.chance.choice(sorted(self.tickets))
            self.coordinator.leave_line([key], self.now)
            self.tickets.discard(key)
            self.ends[key] += 1

    # -- all of it ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += self.chance.expovariate(20.0)
        moves: list[tuple[Any, float]] = [
            (self.arrive, 5),
            (self.again, 1),
            (self.finish, 4),
            (self.report, 4),
            (lambda: self.report(heard=False), 0.3),
            (self.news, 5),
            (self.leave, 0.5),
            (self.crash, 0.1),
            (lambda: self.coordinator.tick(self.now), 3),
        ]
        self.chance.choices([move for move, _ in moves], [weight for _, weight in moves])[0]()
        self.check()

    def check(self) -> None:
        self.coordinator.check()
        view, waiting = self.coordinator._view, self.coordinator._dispatch.waiting
        for state in self.coordinator.groups(self.now):
            assert state.committed >= 0 and state.grants >= 0
        for group in view.groups.values():
            if group.alone:
                assert list(group.ledger.open) == [group.alone], f"seed {self.seed}: a suspect is not alone"
        assert len(view.holders) == sum(len(group.ledger.open) for group in view.groups.values())
        answers = {
            (found.request, found.attempt)
            for box in self.coordinator._news._outboxes.values()
            for _, found in box.answers
        }
        for request, attempt in self.tickets:
            stands = request in waiting and waiting[request].ask.attempt == attempt
            lapsed = self.asks[request][0] in self.coordinator._news._lapsed or self._has_other_life(request)
            assert stands or (request, attempt) in answers or lapsed, f"seed {self.seed}: {request} was forgotten"
        assert not self.ends or max(self.ends.values()) == 1, f"seed {self.seed}: a ticket ended twice"

    def _has_other_life(self, request: str) -> bool:
        box = self.coordinator._news._outboxes.get(self.asks[request][0])
        return box is None or box.life != 1

    def settle_down(self) -> None:
        """Nobody comes any more, everything ends: nothing is left."""
        for _ in range(100):
            self.now += 0.5
            for name in "ab":
                if name not in self.groups or name not in self.coordinator._view.groups:
                    self.join(name)
            for group in list(self.groups.values()):
                reply = self.coordinator.report(group.report(self.chance), self.now)
                for name in set(reply.void) - set(group.live):
                    group.void.add(name)
                    group.voided.append(name)
                for grant in list(group.live.values()):
                    del group.live[grant.id]
                    self.coordinator.settle([Outcome(grant.id, Finish.STOP, 1, 0, 1)], self.now)
            for ingress in "ij":
                told = self.coordinator.news(ingress, self.acked[ingress], self.now)
                for found in told.answers:
                    self.answer(found)
                self.acked[ingress] = told.number
            self.coordinator.tick(self.now)
            self.coordinator.check()
        assert self.coordinator.waiting == 0, f"seed {self.seed}: somebody waits for ever"
        for state in self.coordinator.groups(self.now):
            assert (state.committed, state.grants) == (0, 0) or state.card.group == "c", f"seed {self.seed}: {state}"
        assert not self.coordinator._view.latest, f"seed {self.seed}"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_called_in_whatever_order_it_adds_up(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(600):
        driver.step()
    driver.settle_down()


def test_the_driver_sees_every_kind_of_answer() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 112):
        driver = Driver(seed)
        for _ in range(600):
            driver.step()
        seen += driver.seen
    assert set(seen) >= {
        "grant",
        "cluster_full",
        "tenant_limit",
        "never_fits",
        "no_group",
        "stale_attempt",
        "timed_out",
    }, seen
