"""What it costs to be full, and who waits then: minutes of a full group in virtual time, real coordinator and engine.

The figures are those that `tidegate bench` measures over HTTP (`deploy/NOTES.md`); here they are the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.coordination.grants import Share
from cluster.coordination.terms import CoordinatorTerms, Thresholds
from tests.saturation import Client, Saturation
from workers.sequence import Priority

NEVER = Thresholds(trim_up=9, trim_down=9, shrink_up=9, shrink_down=9, refuse_up=9, refuse_down=9)
MINUTES = 3
WARM_UP_S = 15.0
FLOOD, QUIET = Share("flood"), Share("quiet")


def loop(blocks: int, clients: int, ladder: Thresholds, slots: int = 64, *, open_end: bool = False) -> Saturation:
    """Three minutes of clients that ask again at once."""
    crowd = [Client(Share(), prompt=(43, 128), open_end=open_end) for _ in range(clients)]
    terms = CoordinatorTerms(ladder=ladder)
    return Saturation(crowd, blocks=blocks, slots=slots, terms=terms).run(60.0 * MINUTES)


@pytest.mark.slow
def test_the_ladders_price() -> None:
    with_ladder = loop(364, 96, Thresholds())
    fixed = {slots: loop(364, 96, NEVER, slots).rate(WARM_UP_S) for slots in (16, 32, 64, 96)}
    assert with_ladder.held(WARM_UP_S) >= 0.90
    assert with_ladder.rate(WARM_UP_S) >= 0.97 * max(fixed.values()), fixed
    assert with_ladder.changes <= 6 * MINUTES
    assert with_ladder.recomputed <= 0.03


@pytest.mark.parametrize("open_end", [False, True])
def test_in_a_pool_for_twenty_the_ladder_costs_nothing_and_does_not_flap(open_end: bool) -> None:
    with_ladder, without = (loop(153, 48, ladder, open_end=open_end) for ladder in (Thresholds(), NEVER))
    assert with_ladder.rate(WARM_UP_S) >= 0.97 * without.rate(WARM_UP_S)
    assert with_ladder.held(WARM_UP_S) >= (0.75 if open_end else 0.85)
    assert with_ladder.changes <= 6 * MINUTES
    assert with_ladder.recomputed <= 0.03


def quiet_beside(*others: Callable[[], list[Client]], share: Share = QUIET, seeds: int = 1) -> list[float]:
    """Seconds to the first token of a client that asks every two seconds, sorted."""
    waits: list[float] = []
    for seed in range(seeds):
        quiet = Client(share, prompt=(43, 128), output=(16, 64), pause=2.0, steady=True)
        crowd = [client for make in others for client in make()]
        Saturation([quiet, *crowd], blocks=76, seed=seed).run(60.0 * MINUTES)
        assert len(quiet.waits) >= 5
        waits += quiet.waits
    return sorted(waits)


def flood(priority: Priority = Priority.INTERACTIVE) -> list[Client]:
    """48 that ask again at once."""
    return [Client(FLOOD, priority, prompt=(43, 128)) for _ in range(48)]


def late(waits: list[float]) -> float:
    """The 95th percentile."""
    return waits[int(0.95 * len(waits))]


def test_a_quiet_tenant_beside_one_that_floods() -> None:
    beside = late(quiet_beside(flood, seeds=4))
    assert beside <= 3 * late(quiet_beside(seeds=4))
    assert beside <= late(quiet_beside(flood, share=FLOOD)) / 4, "beside first come, first served"


def test_interactive_work_beside_batch_work_that_fills_the_pool() -> None:
    beside = late(quiet_beside(lambda: flood(Priority.BATCH)))
    assert beside <= 3 * late(quiet_beside())


def test_tenants_that_are_all_guests_share_like_one() -> None:
    """Room for guests is bounded: with as many tenants as clients nobody gains, and nothing is lost."""
    many = [Client(Share(f"t{number}"), prompt=(43, 128)) for number in range(48)]
    alone = [Client(Share(), prompt=(43, 128)) for _ in range(48)]
    shared, single = (Saturation(clients, blocks=76).run(120.0) for clients in (many, alone))
    assert shared.rate(WARM_UP_S) >= 0.97 * single.rate(WARM_UP_S)
    assert shared.recomputed <= 0.03
    assert max(max(client.waits) for client in many) <= 2 * max(max(client.waits) for client in alone)
