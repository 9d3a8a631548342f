"""Settings that reach a running group: how long, whether and how much it caches; what it may run; handing over."""

from __future__ import annotations

import logging

import pytest

from tests.engine_bench import OWN, cached, make, report, request, run
from workers.loglevel import OURS, set_log_level
from workers.orders import OBEY_S, GroupTerms, Orders
from workers.outbox import Outbox
from workers.plan import Limits


def asked(outbox: Outbox, name: str) -> int:
    """How much of a request's prompt was found cached, once it has run."""
    return cached(outbox)[name]


def test_a_group_says_by_which_revision_it_goes() -> None:
    engine, _ = make()
    assert report(engine).revision == 0
    engine.obey(None, (), Orders(7, GroupTerms()))
    assert report(engine, 1.0).revision == 7


def test_a_shorter_life_holds_for_what_is_cached_already() -> None:
    engine, _ = make()
    engine.submit("i", request("a", namespace=b"n"))
    run(engine, 1.0)
    assert report(engine, 2.0).pool.idle > 0
    engine.obey(None, (), Orders(1, GroupTerms(session_ttl_s=5.0)))
    engine.turn(3.0)
    assert engine.patience(3.0) == pytest.approx(3.0, abs=1.0)
    engine.turn(7.0)
    assert report(engine, 7.0).pool.idle == 0
    engine._scheduler.store.check()


def test_switched_off_nothing_is_found_and_nothing_kept_and_on_again_it_is() -> None:
    engine, outbox = make()
    names = iter("abcdefgh")

    def hits(now: float) -> int:
        name = next(names)
        engine.submit("i", request(name, namespace=b"n"))
        engine.renew("i", now)
        run(engine, now)
        return asked(outbox, name)

    assert (hits(1.0), hits(1.1) > 0) == (0, True)
    engine.submit("i", request("live", namespace=b"n"))
    engine.turn(1.2)
    engine.obey(None, (), Orders(1, GroupTerms(prefix_cache=False)))
    run(engine, 1.3)
    assert hits(1.4) == hits(1.5) == 0
    pool = report(engine, 1.6).pool
    assert (pool.idle, pool.held) == (0, 0)
    engine.obey(None, (), Orders(2, GroupTerms()))
    engine.turn(1.7)
    assert (hits(1.8), hits(1.9) > 0) == (0, True)
    engine._scheduler.store.check()


def test_a_purge_is_carried_out_once_however_often_it_is_said() -> None:
    engine, outbox = make()
    engine.submit("i", request("a"))
    run(engine, 1.0)
    orders = Orders(2, GroupTerms(purges=1))
    engine.obey(None, (), orders)
    engine.turn(1.1)
    assert report(engine, 1.2).pool.idle == 0
    engine.submit("i", request("b"))
    run(engine, 1.3)
    engine.obey(None, (), orders)
    engine.turn(1.4)
    assert report(engine, 1.5).pool.idle > 0 and asked(outbox, "b") == 0


def test_lower_limits_are_the_groups_own_also_without_the_coordinator() -> None:
    engine, _ = make()
    engine.obey(OWN, (), Orders(1, GroupTerms(max_num_seqs=2, max_num_batched_tokens=16)))
    for now in (1.0, 2.0 + OBEY_S):
        engine.turn(now)
        assert engine._scheduler.limits == Limits(2, 16, 16)
    engine.obey(None, (), Orders(2, GroupTerms(max_num_seqs=1000)))
    engine.turn(30.0)
    assert engine._scheduler.limits == OWN, "what it was built with"


def test_handing_over_ends_every_stream_and_what_it_carried() -> None:
    engine, outbox = make()
    engine.submit("i", request("a", output=20))
    engine.turn(1.0)
    assert not engine.idle
    engine.obey(None, (), Orders(1, GroupTerms(), hand_over=True))
    engine.turn(1.1)
    assert outbox.closed and engine.idle
    run(engine, 1.2)
    assert report(engine, 1.3).pool.held == 0
    engine._scheduler.store.check()


def test_the_log_level_is_that_of_all_our_loggers() -> None:
    before = {name: logging.getLogger(name).level for name in OURS}
    try:
        set_log_level("error")
        assert {logging.getLogger(name).level for name in OURS} == {logging.ERROR}
        with pytest.raises(ValueError, match="log_level must be one of debug, info, warning, error"):
            set_log_level("loud")
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
