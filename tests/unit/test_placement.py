"""Placement: likeness against load, over any number of groups; what it looks at and what it remembers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.coordination.affinity import Affinity
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant
from cluster.coordination.groupview import GroupView
from cluster.coordination.roster import Roster
from cluster.coordination.terms import Bounds, CoordinatorTerms
from tests.coordination import ask, card, outcome, placed, queued, report, terms

BIG = {"blocks": 1000, "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 8000}


def cluster(*names: str, bounds: Bounds | None = None, **changes: object) -> Coordinator:
    made = Coordinator(terms(bounds))
    for name in names:
        made.join(card(name, **(BIG | changes)), 0.0)
    return made


def alike(request: str, *keys: bytes, **changes: object) -> Ask:
    return ask(request, affinity=keys or (b"s",), **changes)


def end(coordinator: Coordinator, grant: Grant, now: float = 0.0) -> None:
    coordinator.settle([outcome(grant)], now)


@pytest.mark.parametrize("seed", range(5))
def test_a_session_goes_back_to_the_group_that_served_it(seed: int) -> None:
    chance = random.Random(seed)
    coordinator = cluster(*"abcdefgh")
    home: dict[int, str] = {}
    for number in range(400):
        session = chance.randrange(40)
        grant = placed(coordinator, alike(str(number), b"%d" % session), number / 10)
        assert home.setdefault(session, grant.group) == grant.group
        end(coordinator, grant, number / 10)
        for name in "abcdefgh":
            coordinator.report(report(sequence=number + 1, group=name), number / 10)
    assert len(set(home.values())) >= 1


def test_a_small_difference_of_load_does_not_cost_a_session_its_cache() -> None:
    coordinator = cluster("a", "b", max_num_seqs=64)
    home = placed(coordinator, alike("0"))
    others = [placed(coordinator, ask(f"o{number}")) for number in range(3)]
    assert placed(coordinator, alike("1")).group == home.group and others


@pytest.mark.parametrize(("prompt", "stays"), [(4, False), (2000, True)])
def test_likeness_is_worth_the_prefill_that_it_saves(prompt: int, stays: bool) -> None:
    coordinator = cluster("a", "b")
    home = placed(coordinator, alike("0", prompt=prompt))
    for number in range(3):
        end(coordinator, placed(coordinator, ask(f"x{number}")))
        placed(coordinator, ask(f"o{number}", avoid=(("ab".replace(home.group, ""), 1),)))
    assert (placed(coordinator, alike("1", prompt=prompt)).group == home.group) == stays


def test_a_full_group_loses_whatever_it_has_cached() -> None:
    coordinator = cluster("a", "b", max_num_seqs=4, blocks=10_000)
    groups = Counter(placed(coordinator, alike(str(number), prompt=3000)).group for number in range(2))
    for number in range(8):
        groups[placed(coordinator, alike(f"more{number}", prompt=100)).group] += 1
    assert min(groups.values()) >= 4, "likeness never piles all work on one group"
    queued(coordinator, alike("too many"))


@pytest.mark.parametrize("seed", range(5))
def test_one_popular_likeness_is_spread_over_all_groups(seed: int) -> None:
    chance, coordinator = random.Random(seed), cluster(*"abcd")
    counts = Counter(
        placed(coordinator, alike(str(number), b"all", prompt=chance.randrange(1, 200))).group for number in range(48)
    )
    assert len(counts) == 4 and max(counts.values()) - min(counts.values()) <= 10, counts


def test_the_strongest_likeness_counts_most() -> None:
    coordinator = cluster("a", "b")
    first = placed(coordinator, alike("0", b"session", prompt=1000))
    second = placed(coordinator, alike("1", b"head", prompt=1000))
    assert first.group != second.group
    end(coordinator, first)
    end(coordinator, second)
    for name in "ab":
        coordinator.report(report(group=name), 1.0)
    for number, keys in enumerate([(b"session", b"head"), (b"head", b"session")]):
        grant = placed(coordinator, alike(f"x{number}", *keys, prompt=1000), 1.0)
        assert grant.group == (first.group, second.group)[number]
        end(coordinator, grant, 1.0)
        coordinator._dispatch.placement.affinity.remember((b"session",), (first.group, 1), 1.0)
        coordinator._dispatch.placement.affinity.remember((b"head",), (second.group, 1), 1.0)
        for name in "ab":
            coordinator.report(report(group=name, sequence=number + 2), 1.0)


def test_what_a_group_tells_of_the_namespace_counts_more_than_the_guess() -> None:
    coordinator = cluster("a", "b")
    home = placed(coordinator, alike("0", prompt=2000))
    end(coordinator, home)
    coordinator.report(report(group=home.group, sessions=((b"n", 1, 100.0),)), 1.0)
    for number in range(12):
        placed(coordinator, ask(f"o{number}", prompt=1, avoid=(("ab".replace(home.group, ""), 1),)), 1.0)
    assert placed(coordinator, alike("1", prompt=2000), 1.0).group != home.group, "one block is left of it"


@pytest.mark.parametrize("how", ["time", "rebuilt", "gone", "leaving", "shunned", "other model"])
def test_likeness_ends_with_its_time_or_its_group(how: str) -> None:
    coordinator = Coordinator(CoordinatorTerms(Bounds(affinity_s=60.0, lapse_s=1000.0, drop_s=1000.0, stall_s=1000.0)))
    for name in ("a", "b"):
        coordinator.join(card(name, models=("m", "x") if name == "b" else ("m",), **BIG), 0.0)
    home = placed(coordinator, alike("0", prompt=1000))
    assert home.group == "a"
    end(coordinator, home)
    busy = placed(coordinator, ask("busy", avoid=(("b", 1),)))
    one, now = alike("1", prompt=1000), 1.0
    assert placed(coordinator, alike("check", prompt=1000), now).group == "a"
    if how == "time":
        now = 62.0
    elif how == "rebuilt":
        coordinator.join(card("a", **BIG), now)
        placed(coordinator, ask("busy too", avoid=(("b", 1),)), now)
    elif how in ("gone", "leaving"):
        coordinator.leave("a", 1, now)
    elif how == "shunned":
        one = alike("1", prompt=1000, avoid=(("a", 1),))
    else:
        one = alike("1", prompt=1000, model="x")
    assert placed(coordinator, one, now).group == "b" and busy


def test_the_memory_of_likeness_is_bounded_and_forgets_what_was_used_least() -> None:
    memory = Affinity(10.0, 3)
    for number, key in enumerate((b"a", b"b", b"c", b"a", b"d")):
        memory.remember((key,), ("g", number), 0.0)
    assert len(memory) == 3
    assert [memory.group(key, 0.0) for key in (b"a", b"b", b"c", b"d")] == [("g", 3), None, ("g", 2), ("g", 4)]
    assert memory.group(b"a", 10.5) is None
    memory.remember((b"e",), ("g", 9), 20.0)
    assert len(memory) == 1, "what is out of date makes room by itself"


def test_the_least_loaded_group_is_taken_whatever_the_sizes() -> None:
    coordinator = Coordinator(terms())
    for number in range(20):
        coordinator.join(card(f"g{number}", blocks=1000 + number, max_num_seqs=8, max_num_batched_tokens=4096), 0.0)
    counts = Counter(placed(coordinator, ask(str(number))).group for number in range(100))
    assert len(counts) == 20 and set(counts.values()) == {5}


def test_a_request_that_only_a_busy_large_group_holds_waits_for_it() -> None:
    coordinator = Coordinator(terms())
    for number in range(30):
        coordinator.join(card(f"small{number}", blocks=100, max_model_len=1600), 0.0)
    coordinator.join(card("large", blocks=106, max_model_len=1696), 0.0)
    busy = placed(coordinator, ask("busy", prompt=1000, most=650))
    assert busy.group == "large"
    queued(coordinator, ask("long", prompt=1000, most=650))
    for number in range(10):
        assert placed(coordinator, ask(str(number))).group != "large"
    coordinator.settle([outcome(busy)], 1.0)
    (found,) = coordinator.news("i", 0, 1.0).answers
    assert isinstance(found, Grant) and (found.request, found.group) == ("long", "large")


@pytest.mark.parametrize("seed", range(10))
def test_the_roster_shows_the_least_loaded_in_order_and_nobody_who_was_removed(seed: int) -> None:
    chance, roster = random.Random(seed), Roster()
    groups = [GroupView(card(str(number)), 1, number, 0.0, CoordinatorTerms()) for number in range(50)]
    listed: set[GroupView] = set()
    for _ in range(2000):
        group = chance.choice(groups)
        if chance.random() < 0.2:
            roster.remove(group)
            listed.discard(group)
        else:
            group.rank = chance.choice((chance.random(), 0.5))
            roster.put(group)
            listed.add(group)
        heads = list(roster.heads("m", 1))
        assert set(heads) <= listed and len(heads) == len(set(heads))
        assert heads == sorted(listed, key=lambda g: (g.rank, g.number))[:8]
    assert list(roster.heads("other", 1)) == [] and list(roster.heads("m", 100_000)) == []
