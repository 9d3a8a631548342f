"""The waiting line by itself: classes, urgency and aging, fairness between tenants, order within one, bounds, ages."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from cluster.coordination.grants import Ask
from cluster.coordination.line import Line
from cluster.coordination.terms import LineBounds
from cluster.coordination.waiter import FOREVER, Waiter
from tests.coordination import ask, tenant
from workers.sequence import Priority

SERIALS = itertools.count()
BATCH = Priority.BATCH


def waiter(one: Ask, arrived: float = 0.0) -> Waiter:
    return Waiter(one, "i", "m", arrived - one.age, FOREVER, one.max_tokens, next(SERIALS))


def line_of(*waiters: Waiter, **bounds: float) -> Line:
    line = Line(LineBounds(**bounds))  # type: ignore[arg-type]
    for one in waiters:
        line.add(one)
    line.check()
    return line


def drain(line: Line, most: int = 10_000, now: float = 0.0) -> list[str]:
    """Serve whoever is first, again and again."""
    served = []
    while len(line) and len(served) < most:
        line.advance(now)
        first = next(line.walk())
        line.take(first, now)
        line.check()
        served.append(first.ask.request)
    return served


def crowd(name: str, count: int, weight: float = 1.0, **changes: object) -> list[Waiter]:
    return [waiter(ask(f"{name}{n}", share=tenant(name, weight), **changes)) for n in range(count)]


def test_interactive_goes_before_batch_and_replays_before_others_of_their_class() -> None:
    line = line_of(
        waiter(ask("batch", priority=BATCH)),
        waiter(ask("plain")),
        waiter(ask("batch again", priority=BATCH, replay=True)),
        waiter(ask("again", replay=True, urgency=9)),
        waiter(ask("urgent", urgency=-9)),
    )
    assert drain(line) == ["again", "urgent", "plain", "batch again", "batch"]


@pytest.mark.parametrize("urgencies", [(0, 1, -1), (100, -100, 0), (3, 2, 1)])
def test_lower_urgency_goes_first_within_a_class(urgencies: tuple[int, ...]) -> None:
    line = line_of(*(waiter(ask(str(urgency), urgency=urgency)) for urgency in urgencies))
    assert drain(line) == [str(urgency) for urgency in sorted(urgencies)]


@pytest.mark.parametrize("order", list(itertools.permutations((3.0, 1.0, 2.0))))
def test_a_tenants_requests_go_in_the_order_of_their_first_arrival(order: tuple[float, ...]) -> None:
    line = line_of(*(waiter(ask(str(age), age=age), 100.0) for age in order))
    assert drain(line) == ["3.0", "2.0", "1.0"]


@pytest.mark.parametrize(("steps", "aging"), [(1, 30.0), (5, 30.0), (3, 10.0)])
def test_waiting_for_the_aging_time_is_worth_one_step_of_urgency(steps: int, aging: float) -> None:
    for late, first in ((steps * aging - 1, "urgent"), (steps * aging + 1, "patient")):
        line = line_of(
            waiter(ask("patient", urgency=steps, share=tenant("p")), 0.0),
            waiter(ask("urgent", share=tenant("u")), late),
            aging_s=aging,
        )
        assert drain(line, 1) == [first]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_waits_much_longer_than_its_steps_of_urgency_are_worth(seed: int) -> None:
    chance, aging = random.Random(seed), 5.0
    line, now = Line(LineBounds(aging_s=aging)), 0.0
    line.add(waiter(ask("patient", urgency=4, share=tenant("p")), 0.0))
    while True:
        now += 1.0
        line.add(waiter(ask(f"u{now}", urgency=chance.choice((-1, 0, 1)), share=tenant(chance.choice("abc"))), now))
        if "patient" in drain(line, 1, now):
            break
    assert 3 * aging <= now <= 5 * aging + 5


def test_batch_work_counts_as_interactive_when_it_has_waited_long_enough() -> None:
    line = line_of(waiter(ask("old", priority=BATCH), 0.0), waiter(ask("young", priority=BATCH), 50.0), batch_s=60.0)
    line.add(waiter(ask("now", share=tenant("other")), 59.0))
    assert drain(line, 1, 59.0) == ["now"]
    line.advance(61.0)
    line.add(waiter(ask("again", share=tenant("other")), 61.0))
    assert drain(line, now=61.0) == ["old", "again", "young"]


def test_overdue_batch_work_takes_turns_with_its_tenants_interactive_work() -> None:
    line = line_of(*crowd("b", 20, priority=BATCH), batch_s=60.0)
    for number in range(5):
        line.add(waiter(ask(f"i{number}", share=tenant("b")), 100.0))
    served = drain(line, 10, 100.0)
    assert sum(name.startswith("i") for name in served) == 5


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.5, 2.0, 1.0), (1.0, 10.0)])
@pytest.mark.parametrize("seed", range(3))
def test_tenants_that_wait_are_served_tokens_by_weight(weights: tuple[float, ...], seed: int) -> None:
    chance = random.Random(seed)
    line = Line(LineBounds())
    cost: dict[str, int] = {}
    largest = 0
    for number, weight in enumerate(weights):
        for n in range(300):
            one = waiter(
                ask(f"{number}/{n}", share=tenant(str(number), weight), prompt=chance.randrange(1, 400), most=50)
            )
            cost[one.ask.request], largest = one.cost, max(largest, one.cost)
            line.add(one)
    served: Counter[str] = Counter()
    waiting = Counter({str(number): 300 for number in range(len(weights))})
    while all(waiting.values()):
        (name,) = drain(line, 1)
        served[name.partition("/")[0]] += cost[name]
        waiting[name.partition("/")[0]] -= 1
        shares = [served[str(number)] / weight for number, weight in enumerate(weights)]
        # Start-time fair queuing: two tenants differ by at most one largest request of each.
        assert max(shares) - min(shares) <= 2 * largest / min(weights)


def test_a_quiet_tenant_goes_next_whatever_stands_there() -> None:
    line = line_of(*crowd("noisy", 100))
    drain(line, 20)
    line.add(waiter(ask("quiet", share=tenant("quiet")), 5.0))
    assert "quiet" in drain(line, 2)


def test_a_tenant_that_comes_back_has_saved_up_nothing() -> None:
    line = line_of(*crowd("busy", 200), *crowd("gone", 1))
    drain(line, 101)
    for one in crowd("gone", 50):
        line.add(one)
    served = Counter(name[:4] for name in drain(line, 40))
    assert 19 <= served["gone"] <= 21, served


def test_leaving_and_coming_again_does_not_forget_what_a_tenant_had() -> None:
    line = line_of(*crowd("slow", 50))
    served: Counter[str] = Counter()
    for number in range(40):
        line.add(waiter(ask(f"fast{number}", share=tenant("fast"))))  # one at a time, as soon as its last was served
        while True:
            (name,) = drain(line, 1)
            served[name[:4]] += 1
            if name.startswith("fast"):
                break
    assert served["slow"] >= 39, served


def test_of_equals_who_has_waited_longest_goes_first() -> None:
    line = line_of(*(waiter(ask(name, share=tenant(name))) for name in ("zoe", "eve", "ann")))
    assert drain(line) == ["zoe", "eve", "ann"]
    line = line_of(waiter(ask("zoe", share=tenant("zoe"))), *crowd("x", 3))
    for number in range(20):
        line.add(waiter(ask(f"a{number}", share=tenant(f"a{number}"))))
    assert "zoe" in drain(line, 3)


def test_walking_shows_the_order_in_which_all_are_served() -> None:
    chance = random.Random(3)
    line = Line(LineBounds())
    for number in range(60):
        name = chance.choice("abc")
        line.add(waiter(ask(str(number), share=tenant(name, {"a": 1.0, "b": 2.0, "c": 5.0}[name]), prompt=number)))
    shown = [one.ask.request for one in line.walk()]
    assert drain(line) == shown


def test_who_leaves_pays_nothing() -> None:
    first, *others = crowd("a", 3)
    line = line_of(first, *others, *crowd("b", 3))
    line.remove(first)
    assert drain(line) == ["a1", "b0", "a2", "b1", "b2"]


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (ask(), "cluster_full"),
        (ask(share=tenant("busy", most=4)), "tenant_limit"),
        (ask(share=tenant("busy", most=5)), "cluster_full"),
        (ask(priority=BATCH), "cluster_full"),
        (ask(replay=True), None),
        (ask(replay=True, share=tenant("busy", most=4)), None),
    ],
)
def test_beyond_its_bounds_the_line_refuses_all_but_replays(one: Ask, code: str | None) -> None:
    line = line_of(*crowd("busy", 4), requests=4)
    found = line.obstacle(one, 32)
    assert (found[0] if found else None) == code
    assert line.full and (found is None or found[1] >= 32)


def test_the_bound_counts_tokens_too_but_never_refuses_the_only_one() -> None:
    line = line_of(*crowd("a", 3), tokens=100)
    assert line.obstacle(ask(), 32) is not None
    assert line.obstacle(ask(), 4) is None
    assert line_of(tokens=100).obstacle(ask(), 500) is None


def test_batch_work_cannot_fill_the_line_for_interactive_work() -> None:
    line = line_of(*crowd("b", 12, priority=BATCH), requests=16)
    assert line.obstacle(ask(priority=BATCH), 32) is not None
    assert line.obstacle(ask(), 32) is None


def test_ages_are_told_by_class() -> None:
    line = line_of(
        waiter(ask("1"), 1.0), waiter(ask("2"), 5.0), waiter(ask("3"), 6.0), waiter(ask("b", priority=BATCH), 0.0)
    )
    facts = line.classes[Priority.INTERACTIVE].at(10.0)
    assert (facts["waiting"], facts["oldest_s"], facts["median_s"], facts["tokens"]) == (3, 9.0, 5.0, 96)
    drain(line, 1, 10.0)
    facts = line.classes[Priority.INTERACTIVE].at(10.0)
    assert (facts["waiting"], facts["oldest_s"], facts["served"], facts["served_wait_s"]) == (2, 5.0, 1, 9.0)
    assert line.classes[BATCH].at(10.0)["oldest_s"] == 10.0


def test_how_many_stand_before_one_is_told() -> None:
    own = crowd("a", 3)
    batch = waiter(ask("b", priority=BATCH, share=tenant("b")))
    line = line_of(*own, batch, waiter(ask("u", urgency=-3, share=tenant("u"))), waiter(ask("o", share=tenant("o"))))
    assert [line.ahead_of(one) for one in own] == [1, 3, 4]
    assert line.ahead_of(batch) == 5


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_the_counters_equal_a_recount(seed: int) -> None:
    chance = random.Random(seed)
    line, now, inside = Line(LineBounds(batch_s=20.0)), 0.0, []
    for number in range(400):
        now += chance.random()
        line.advance(now)
        step = chance.random()
        if step < 0.55 or not inside:
            name = chance.choice("abcdef")
            one = ask(
                str(number),
                share=tenant(name, ord(name) - 96),
                urgency=chance.randrange(-2, 3),
                priority=chance.choice(tuple(Priority)),
                prompt=chance.randrange(1, 100),
                replay=chance.random() < 0.1,
                age=chance.choice((0.0, 0.0, chance.uniform(0, 40))),
            )
            inside.append(waiter(one, now))
            line.add(inside[-1])
        elif step < 0.85:
            first = next(line.walk())
            line.take(first, now)
            inside.remove(first)
        else:
            line.remove(inside.pop(chance.randrange(len(inside))))
        line.check()
        assert len(line) == len(inside)
    assert len(drain(line, now=now)) == len(inside)
