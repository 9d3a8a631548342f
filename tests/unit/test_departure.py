"""How long a node still has, by what Ray's GCS says of nodes that go."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from cluster import departure

HERE, ELSEWHERE = "aa", "bb"


@pytest.mark.parametrize(
    ("in_s", "expected_s"),
    [
        ({}, None),
        ({ELSEWHERE: 30}, None),
        ({ELSEWHERE: 10, HERE: 30}, 30),
        ({HERE: -4}, -4),
    ],
)
def test_the_deadline_is_this_nodes(
    monkeypatch: pytest.MonkeyPatch, in_s: dict[str, int], expected_s: float | None
) -> None:
    notices(monkeypatch, {node: int((time.time() + seconds) * 1000) for node, seconds in in_s.items()})
    left = departure.seconds_left()
    assert left == expected_s if expected_s is None else left == pytest.approx(expected_s, abs=0.5)


def test_a_notice_without_a_deadline_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    notices(monkeypatch, {HERE: 0})
    assert departure.seconds_left() is None


def notices(monkeypatch: pytest.MonkeyPatch, deadlines_ms: dict[str, int]) -> None:
    """What the GCS says from now on."""
    gcs = SimpleNamespace(get_draining_nodes=lambda timeout: deadlines_ms)
    worker = SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs))
    ray = SimpleNamespace(
        _private=SimpleNamespace(worker=worker),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: HERE),
    )
    monkeypatch.setattr(departure, "ray", ray)
