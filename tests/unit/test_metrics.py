"""The catalogue's metrics as Ray gets them: from the coordinator's exporter and from an ingress."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from cluster import meters, metrics
from cluster.meters import CATALOGUE, OTHER
from cluster.requests.meter import Ending, Labels
from tests.statuses import a_report, a_status
from workers.sequence import Priority


class Instrument:
    """Stands for a metric of Ray's: notes what is recorded, and holds Ray's own rules."""

    made: ClassVar[dict[str, Instrument]] = {}

    def __init__(self, name: str, description: str, *rest: Any) -> None:
        *buckets, self.keys = rest
        self.name, self.buckets, self.records = name, buckets, []
        assert name not in self.made, "made twice"
        self.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> Instrument:
        self.tags = tags
        return self

    def _record(self, value: float, tags: dict[str, str]) -> None:
        assert set(self.keys) == set(self.tags | tags), "every tag must be given, and no other"
        assert all(isinstance(text, str) for text in tags.values())
        self.records.append((value, tags))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self._record(value, tags)

    set = observe = _record


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Instrument]:
    monkeypatch.setattr(Instrument, "made", {})
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics.ray_metrics, name, Instrument)
    return Instrument.made


def test_the_exporter_records_every_kind_with_all_its_tags(made: dict[str, Instrument]) -> None:
    exporter = metrics.CoordinatorExporter("s")
    exporter.heard(a_report())
    exporter.export(a_status(), 1.0)
    assert made["tidegate_preemptions"].records == [(1004, {"model": "m", "group": "0"})]
    assert len(made["tidegate_request_peak_kv_bytes"].records) == 5
    assert {instrument.tags["service"] for instrument in made.values()} == {"s"}
    exporter.heard(a_report(sequence=2, preemptions=1010))
    exporter.export(a_status(), 2.0)
    assert made["tidegate_preemptions"].records[1:] == [(6, {"model": "m", "group": "0"})]


def labels_of(tenant: str, priority: Priority = Priority.INTERACTIVE) -> Labels:
    return Labels(model="m", tenant=tenant, priority=priority)


def ending(**changes: Any) -> Ending:
    facts: dict[str, Any] = {
        "finish": "stop",
        "seconds": 2.0,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 20,
        "replays": 0,
        "deaths": 0,
        "poisoned": False,
    }
    return Ending(**(facts | changes))


def test_an_ingress_records_a_requests_whole_life(made: dict[str, Instrument]) -> None:
    meter = metrics.IngressMeter("s")
    meter.accepted(labels_of("t"), 0.5)
    meter.first_token(labels_of("t"), 0.75)
    meter.next_tokens(labels_of("t"), 0.3, 3)
    meter.ended(labels_of("t"), ending(replays=1, deaths=2, poisoned=True, finish="poisoned_request"))
    request = {"model": "m", "class": "interactive"}
    for name, value in (("queue", 0.5), ("ttft", 0.75), ("inter_token", pytest.approx(0.1)), ("e2e", 2.0)):
        assert made[f"tidegate_{name}_seconds"].records == [(value, request)]
    assert made["tidegate_requests"].records == [(1, request | {"tenant": "t", "reason": "poisoned_request"})]
    counts = {"replays": 1, "request_group_deaths": 2, "poisoned_requests": 1}
    for name, count in counts.items():
        assert made[f"tidegate_{name}"].records == [(count, {"model": "m"})]
    assert made["tidegate_tenant_cached_tokens"].records == [(40, {"model": "m", "tenant": "t"})]


def test_every_metric_of_the_catalogue_is_recorded_by_somebody(made: dict[str, Instrument]) -> None:
    exporter, meter = metrics.CoordinatorExporter(), metrics.IngressMeter()
    exporter.heard(a_report())
    exporter.export(a_status(models={"m": a_status()["models"]["m"] | {"expected_output_tokens": 9.5}}))
    meter.accepted(labels_of("t"), 0.5)
    meter.first_token(labels_of("t"), 0.75)
    meter.next_tokens(labels_of("t"), 0.3, 3)
    meter.ended(labels_of("t"), ending(replays=1, deaths=2, poisoned=True))
    assert set(made) == set(CATALOGUE)


def test_a_request_that_got_nothing_records_no_zero_counts(made: dict[str, Instrument]) -> None:
    meter = metrics.IngressMeter("s")
    meter.ended(labels_of("t", Priority.BATCH), ending(finish="cluster_full", cached_tokens=0, output_tokens=0))
    assert "tidegate_replays" not in made and "tidegate_tenant_output_tokens" not in made
    assert made["tidegate_requests"].records[0][1]["class"] == "batch"


def test_tenants_beyond_the_first_twenty_are_one(made: dict[str, Instrument]) -> None:
    meter = metrics.IngressMeter("s")
    for _ in range(2):
        for number in range(100):
            meter.ended(labels_of(f"tenant {number}"), ending(finish=f"reason {number}"))
    seen = [tags for _, tags in made["tidegate_requests"].records]
    assert len({tags["tenant"] for tags in seen}) == meters.TENANTS + 1
    assert sum(tags["tenant"] == OTHER for tags in seen) == 2 * (100 - meters.TENANTS)
    assert len({tags["reason"] for tags in seen}) == 33
