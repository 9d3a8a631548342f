"""Request machines under events in any order, late, doubled and made up: what holds whatever happens."""

from __future__ import annotations

import random

import pytest

from cluster.coordination import grants
from cluster.coordination.grants import Grant, Refusal, Ticket
from cluster.requests import moves
from cluster.requests.work import Endurance, Phase
from tests.machine_bench import Bench
from workers import errors
from workers.plan import Finish, TokenEvent

REFUSALS = [value for name, value in vars(grants).items() if name.startswith("REFUSED_")]
CODES = [value for name, value in vars(errors).items() if name.startswith("CODE_")]


class Fuzz:
    """One machine, its random driver, and a reckoning of what it may do."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        endurance = Endurance(
            deaths=self.chance.choice((0, 1, 2)), misses=self.chance.choice((0, 2, 8)), patience_s=20.0, confirm_s=4.0
        )
        timeout = self.chance.choice((None, 5.0, 60.0))
        self.bench = Bench(most=self.chance.choice((0, 3, 30)), endurance=endurance, timeout_s=timeout)
        self.deadline = float("inf") if timeout is None else timeout
        self.given: dict[str, Grant] = {}
        self.closed: list[str] = []
        self.shown: list[int] = []
        self.submitted: list[int] = []
        self.ends: list[moves.End] = []
        self.left = 0
        self.waits = False
        self.feed(moves.Started())

    def check(self, fact: object, text: str) -> None:
        assert fact, f"seed {self.seed}: {text}"

    def feed(self, event: moves.Event) -> None:
        phase, attempt = self.bench.machine.phase, self.bench.machine.history.attempt
        waiting = phase in (Phase.ASKING, Phase.RESTING, Phase.QUEUED)
        current, waited, own = self.bench.machine.current, self.waits, False
        if isinstance(event, moves.Placed):
            if isinstance(event.answer, Grant) and event.answer.id:
                self.given[event.answer.id] = event.answer
            if waiting and event.answer.attempt == attempt:
                fresh = not (isinstance(event.answer, Grant) and event.answer.id in self.closed)
                self.waits = isinstance(event.answer, Ticket) or (self.waits and not fresh)
                own = isinstance(event.answer, Grant) and not event.answer.id
        actions = self.bench.feed(event)
        if isinstance(event, moves.Arrived) and event.event.attempt != attempt:
            self.check(not actions, "news of another attempt were heard")
        if isinstance(event, moves.Ticked) and self.bench.now >= self.deadline:
            self.check(self.bench.machine.phase is Phase.ENDED, "it outlives its deadline")
        for action in actions:
            self.take(action)
        leaves = [action for action in actions if isinstance(action, moves.Leave)]
        ended = any(isinstance(action, moves.End) for action in actions)
        late = phase is Phase.ENDED or (current is not None and not current.grant.id)
        late = late and isinstance(event, moves.Placed) and isinstance(event.answer, Ticket)
        if late or (ended and waiting and self.waits) or (own and waited):
            self.check(len(leaves) == 1, "it did not leave the line")
        else:
            self.check(not leaves, f"it left a line that it did not stand in, after {event}")
        if any(isinstance(action, moves.Place) for action in actions):
            self.waits = True
        self.check_alarm()

    def take(self, action: moves.Action) -> None:
        if self.ends:
            kind = isinstance(action, moves.Abort | moves.Withdraw | moves.Leave | moves.Wake)
            self.check(kind, f"{action} after the end")
        match action:
            case moves.Settle(outcome):
                self.close(outcome.grant)
            case moves.Withdraw(grant):
                self.close(grant)
            case moves.Emit(event):
                self.check(event.tokens and event.finish is None, "an event that shows nothing new")
                self.show(event)
            case moves.Submit(grant, request):
                self.check(request.attempt not in self.submitted, "an attempt was submitted twice")
                self.check(request.resumed == tuple(self.shown), "it does not resume where the client is")
                self.submitted.append(grant.attempt)
            case moves.End(event, refusal):
                self.ends.append(action)
                self.check(refusal is None or not self.shown, "a refusal after tokens")
                if event is not None:
                    self.show(event)

    def show(self, event: TokenEvent) -> None:
        self.check(event.index == len(self.shown), "a gap in what the client sees")
        self.shown += event.tokens

    def close(self, grant: str) -> None:
        self.check(grant and grant not in self.closed, f"grant {grant!r} closed twice")
        self.closed.append(grant)

    def check_alarm(self) -> None:
        machine, alarm = self.bench.machine, self.bench.alarm
        self.check(len(self.ends) == (machine.phase is Phase.ENDED), "ends are not counted once")
        if machine.phase is Phase.ENDED:
            self.check(alarm is None, "an alarm outlives it")
        elif self.deadline < float("inf"):
            self.check(alarm is not None and alarm <= self.deadline, "it may miss its deadline")
        elif machine.phase in (Phase.RESTING, Phase.QUEUED):
            self.check(alarm is not None, "nothing would ever wake it")

    # -- events --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        chance = self.chance
        self.bench.now += chance.choice((0.0, 0.01, 0.3, 2.0))
        kinds = (self.place, self.answer_submit, self.arrive, self.lose, self.tick)
        chance.choices(kinds, (5, 4, 6, 2, 3))[0]()
        if chance.random() < 0.01:
            self.feed(moves.Cancelled())

    def attempt(self) -> int:
        attempt = self.bench.machine.history.attempt
        return attempt if self.chance.random() < 0.8 else self.chance.randint(0, attempt + 1)

    def place(self) -> None:
        chance, attempt = self.chance, self.attempt()
        kind = chance.random()
        if kind < 0.35:
            self.feed(moves.Placed(Ticket("r", attempt, chance.randint(0, 9))))
        elif kind < 0.55:
            self.feed(moves.Placed(Refusal("r", attempt, chance.choice(REFUSALS), "no", chance.choice((None, 1.0)))))
        elif kind < 0.65 and self.given:
            self.feed(moves.Placed(chance.choice(list(self.given.values()))))
        elif kind < 0.75:
            self.feed(moves.AskLost(attempt))
        elif kind < 0.82:
            self.feed(moves.Placed(Grant("", "r", attempt, chance.choice("ab"), chance.randint(1, 3), "at", 2, 5.0)))
        else:
            grant = self.bench.grant(chance.randint(1, 3), chance.choice("ab"))
            self.feed(moves.Placed(grant))

    def answer_submit(self) -> None:
        attempt, kind = self.attempt(), self.chance.random()
        if kind < 0.6:
            self.feed(moves.Submitted(attempt))
        elif kind < 0.85:
            self.feed(moves.Rejected(attempt, self.chance.choice(CODES), "no"))
        else:
            self.feed(moves.SubmitLost(attempt))

    def arrive(self) -> None:
        chance = self.chance
        index = max(0, len(self.shown) + chance.choice((-2, 0, 0, 0, 0, 1)))
        tokens = tuple(range(100, 100 + chance.randint(0, 3)))
        finish = chance.choice((None, None, None, None, *Finish))
        news = TokenEvent("r", self.attempt(), index, tokens, finish, 1, "bad" if finish is Finish.ERROR else None)
        self.feed(moves.Arrived(chance.randint(1, 4), news))

    def lose(self) -> None:
        if self.chance.random() < 0.5:
            self.feed(moves.LineLost())
        else:
            self.feed(moves.GroupLost(self.chance.choice("ab"), self.chance.randint(1, 4), self.chance.random() < 0.6))

    def tick(self) -> None:
        if self.bench.alarm is not None and self.chance.random() < 0.5:
            self.bench.now = max(self.bench.now, self.bench.alarm)
        self.feed(moves.Ticked())


@pytest.mark.parametrize("batch", range(20))
def test_whatever_happens_a_request_ends_once_and_owes_nobody_anything(batch: int) -> None:
    base = random.SystemRandom().randrange(10**9)
    for seed in range(base, base + 100):
        fuzz = Fuzz(seed)
        for _ in range(fuzz.chance.randint(1, 80)):
            fuzz.step()
        fuzz.feed(moves.Cancelled())
        fuzz.check(len(fuzz.ends) == 1, "it did not end")
        for _ in range(10):
            fuzz.step()
        fuzz.check(len(fuzz.ends) == 1, "it ended twice")
        fuzz.check(set(fuzz.closed) == set(fuzz.given), "a grant was not closed")


def test_the_fuzz_reaches_every_phase_and_every_way_to_end() -> None:
    phases, faults = set(), set()
    for seed in range(600):
        fuzz = Fuzz(seed)
        for _ in range(60):
            fuzz.step()
            phases.add(fuzz.bench.machine.phase)
        if fuzz.ends:
            faults.add(fuzz.bench.machine.fault)
    assert phases == set(Phase) - {Phase.NEW}
    assert faults >= {None, "generation_failed", "timed_out", "poisoned_request", "never_fits", "cluster_full"}
