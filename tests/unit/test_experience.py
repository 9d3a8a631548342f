"""What ended requests teach: expected outputs by tenant and size, and how fast work drains."""

from __future__ import annotations

import random

import pytest

from cluster.coordination.drain import Drain
from cluster.coordination.experience import SAMPLES, Experience


def taught(*lessons: tuple[str, int, int], times: int = SAMPLES) -> Experience:
    """Each (tenant, output, max_tokens) so many times."""
    experience = Experience()
    for tenant, output, most in lessons:
        for _ in range(times):
            experience.learn(tenant, output, most)
    return experience


@pytest.mark.parametrize("most", [0, 1, 7, 100, 4096])
def test_before_anything_is_known_all_that_may_come_is_expected(most: int) -> None:
    assert Experience().expect("a", most) == max(1, most)
    assert taught(("a", 10, 100), times=SAMPLES - 1).expect("a", most) == max(1, most)


def test_a_few_outcomes_are_enough() -> None:
    assert SAMPLES <= 10
    assert taught(("a", 10, 100)).expect("a", 100) == 10


@pytest.mark.parametrize(
    ("tenant", "most", "expected"),
    [
        ("a", 100, 10),
        ("a", 127, 13),  # as large a share of max_tokens
        ("a", 64, 10),
        ("a", 4096, 3000),  # a size of its own
        ("b", 100, 80),
        ("b", 5, 4),
        ("a", 8, 6),  # no such size: of all of the tenant's outputs; never beyond max_tokens
    ],
)
def test_it_is_learned_by_tenant_and_by_size(tenant: str, most: int, expected: int) -> None:
    experience = taught(("a", 10, 100), ("a", 3000, 4096), ("b", 80, 100))
    assert experience.expect(tenant, most) == pytest.approx(expected, abs=1 + expected * 0.35 * (most == 8))
    assert experience.expect(tenant, most) <= most


def test_a_tenant_that_is_not_known_is_expected_to_be_like_all() -> None:
    experience = taught(("a", 20, 100), ("b", 20, 100))
    assert experience.expect("new", 100) == 20
    assert experience.expect("new", 10_000) == 2000, "outputs that ran into a limit say little of a larger one"
    assert experience.expect("new", 30) == 20
    assert taught(("a", 16, 16)).expect("a", 4096) == 4096


def test_outcomes_that_vary_are_expected_with_a_margin() -> None:
    chance, experience = random.Random(1), Experience()
    outputs = [chance.randrange(1, 100) for _ in range(2000)]
    for output in outputs:
        experience.learn("a", output, 100)
    within = sum(output <= experience.expect("a", 100) for output in outputs) / len(outputs)
    assert 0.4 <= within <= 0.75


def test_what_has_changed_is_learned_anew() -> None:
    experience = taught(("a", 10, 100), times=60)
    assert experience.expect("a", 100) <= 12
    for _ in range(60):
        experience.learn("a", 100, 100)
    assert experience.expect("a", 100) >= 99


def test_only_the_tenants_that_were_heard_of_last_are_remembered() -> None:
    experience = Experience(tenants=3)
    for name in ("a", "b", "c", "a", "d"):
        for _ in range(SAMPLES):
            experience.learn(name, 10 if name == "a" else 50, 100)
    assert len(experience) == 3
    assert experience.expect("a", 100) == 10 and experience.expect("b", 100) > 30


def test_the_rate_follows_what_drained_lately() -> None:
    drain = Drain(random.Random(0), window_s=10.0)
    assert drain.rate(0.0) == 0.0 and drain.wait_for(10, 0.0) is None
    for second in range(100):
        drain.add(500, float(second))
    assert drain.rate(99.0) == pytest.approx(500, rel=0.06)
    assert drain.wait_for(5000, 99.0) == pytest.approx(10, rel=0.06)
    assert drain.rate(140.0) < 10.0


def test_the_rate_is_right_soon_after_the_start() -> None:
    drain = Drain(random.Random(0), window_s=10.0)
    for tick in range(30):
        drain.add(50, 1000.0 + tick / 10)
    assert drain.rate(1003.0) == pytest.approx(500, rel=0.15)


def test_what_clients_are_told_is_bounded_and_not_the_same_for_all() -> None:
    drain = Drain(random.Random(0), window_s=10.0, jitter=0.2)
    assert all(4.0 <= drain.retry_after(10, 0.0) <= 6.0 for _ in range(100))
    for second in range(100):
        drain.add(500, float(second))
    told = [drain.retry_after(5000, 99.0) for _ in range(200)]
    assert 7.5 < min(told) < 9 and 11 < max(told) < 12.8
    assert all(0.8 <= drain.retry_after(1, 99.0) <= 1.2 for _ in range(100))
    assert all(48 <= drain.retry_after(10**9, 99.0) <= 60 for _ in range(100))
