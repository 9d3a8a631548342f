"""The coordinator's cost does not grow with requests, and hardly with groups. Ceilings are three times the aims."""

from __future__ import annotations

from deploy.bench.coordination import measure, memory


def test_a_call_costs_microseconds_at_scale() -> None:
    row = measure(300, 3000, 10_000, calls=400)
    assert (row.groups, row.running, row.sessions, row.line) == (300, 3000, 10_000, 0)
    assert row.place_us <= 600 and row.settle_us <= 600 and row.report_us <= 300, row


def test_a_full_line_does_not_make_calls_dear() -> None:
    row = measure(100, 1000, 1000, calls=300, waiting=500)
    assert row.line >= 500
    assert row.place_us <= 600 and row.settle_us <= 600 and row.report_us <= 300, row


def test_placing_costs_about_the_same_with_a_hundred_times_the_groups_or_requests() -> None:
    small = measure(10, 100, 1000, calls=400)
    assert measure(1000, 100, 1000, calls=400).place_us <= 4 * small.place_us
    assert measure(100, 5000, 1000, calls=400).place_us <= 4 * small.place_us


def test_memory_is_a_few_hundred_bytes_per_session() -> None:
    with_sessions, without = memory(10, 10, 20_000), memory(10, 10, 0)
    assert 0 < (with_sessions - without) * 2**20 / 20_000 < 1000
