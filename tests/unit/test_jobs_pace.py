"""How many requests go at once: more while the server takes them, fewer when it does not, none when it says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.jobs.pace import LAST_BACKOFF_S, Pace


def round_of(pace: Pace, now: float, *, waited: bool = False) -> int:
    """Send as many as may go, answer them all a second later; how many there were."""
    sent = 0
    while pace.wait_s(now) == 0:
        pace.sent(now)
        sent += 1
    for _ in range(sent):
        pace.answered(now, now + 1, waited=waited)
    return sent


def test_it_begins_with_one_and_doubles_up_to_its_most() -> None:
    pace = Pace(most=20)
    assert [round_of(pace, float(now)) for now in range(0, 14, 2)] == [1, 2, 4, 8, 16, 20, 20]


def test_a_refusal_halves_it_once_for_all_that_went_before() -> None:
    pace = Pace(most=64, limit=32.0)
    for _ in range(32):
        pace.sent(0.0)
    for _ in range(10):
        pace.refused(0.0, 1.0, retry_after=5.0)
    assert pace.limit == 16 and pace.refusals == 10
    pace.sent(2.0)
    pace.refused(2.0, 3.0, retry_after=5.0)
    assert pace.limit == 8


def test_retry_after_is_kept_to() -> None:
    pace = Pace(most=8, limit=4.0)
    pace.sent(0.0)
    pace.refused(0.0, 1.0, retry_after=7.0)
    assert pace.wait_s(1.0) == 7.0 and pace.wait_s(5.0) == 3.0 and pace.wait_s(8.0) == 0.0
    pace.sent(8.0)
    pace.refused(8.0, 8.5, retry_after=0.0)
    assert pace.wait_s(8.5) == 0.0


def test_without_it_pauses_grow_and_an_answer_ends_that() -> None:
    pace, now, pauses = Pace(most=8, seed=3), 0.0, []
    for _ in range(12):
        pace.sent(now)
        pace.failed(now, now)
        pauses.append(pace.wait_s(now))
        now = pace.paused_until
    assert all(pause is not None and 0 < pause <= LAST_BACKOFF_S for pause in pauses)
    assert (pauses[0] or 0) < 0.6 and (pauses[-1] or 0) >= LAST_BACKOFF_S / 2
    pace.sent(now)
    pace.answered(now, now)
    pace.sent(now)
    pace.failed(now, now)
    assert (pace.wait_s(now) or 9) < 0.6


def test_after_a_refusal_it_grows_by_one_a_round() -> None:
    pace = Pace(most=64, limit=8.0)
    pace.sent(0.0)
    pace.refused(0.0, 0.0, retry_after=0.0)
    assert round_of(pace, 1.0) == 4
    assert 4.8 < pace.limit < 5.0


def test_waiting_in_the_servers_line_makes_it_smaller() -> None:
    pace = Pace(most=64, limit=8.0)
    assert round_of(pace, 0.0, waited=True) == 8
    assert pace.limit == 7


def test_it_does_not_grow_while_it_is_not_used() -> None:
    pace = Pace(most=64, limit=8.0)
    for now in range(10):
        pace.sent(float(now))
        pace.answered(float(now), float(now))
    assert pace.limit == 8


EVENTS = st.lists(
    st.tuples(st.sampled_from(["answered", "waited", "refused", "failed", "dropped"]), st.floats(0, 5)), max_size=80
)


@given(EVENTS, st.integers(1, 40), st.integers(0, 5))
def test_it_stays_within_its_bounds_and_never_stops_for_good(
    events: list[tuple[str, float]], most: int, seed: int
) -> None:
    pace, now, sent = Pace(most=most, seed=seed), 0.0, list[float]()
    for kind, after in events:
        while pace.wait_s(now) == 0:
            pace.sent(now)
            sent.append(now)
        assert pace.under_way == len(sent) <= most
        now += after
        if sent:
            at = sent.pop(0)
            if kind in ("answered", "waited"):
                pace.answered(at, now, waited=kind == "waited")
            elif kind == "refused":
                pace.refused(at, now, after if after > 2 else None)
            elif kind == "failed":
                pace.failed(at, now)
            else:
                pace.dropped()
        assert 1 <= pace.limit <= most
    while sent:
        pace.dropped()
        sent.pop()
    assert pace.wait_s(max(now, pace.paused_until)) == 0
