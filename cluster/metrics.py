"""The catalogue's metrics through Ray: what the coordinator's actor and the ingresses record. A thin shell around
`samples` and `meters`; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from cluster import meters
from cluster.meters import CATALOGUE, Bounded, Kind, Metric
from cluster.requests.meter import Ending, Labels
from cluster.samples import Sample, Tally
from workers.plan import GroupReport

_REASONS = 32
"""Ways to end that are told apart: more than there are codes."""


class Recorder:
    """Records samples under the label `service`. A metric exists from its first sample on."""

    def __init__(self, service: str) -> None:
        self._service = {"service": service}
        self._made: dict[str, Any] = {}

    def record(self, sample: Sample) -> None:
        """One sample."""
        made = self._made.get(sample.metric.name) or self._make(sample.metric)
        match sample.metric.kind:
            case Kind.COUNTER:
                made.inc(sample.value, sample.labels)
            case Kind.GAUGE:
                made.set(sample.value, sample.labels)
            case Kind.HISTOGRAM:
                for _ in range(sample.times):
                    made.observe(sample.value, sample.labels)

    def count(self, metric: Metric, labels: dict[str, str], value: float) -> None:
        """Add to a counter; nothing is added where there is nothing."""
        if value > 0:
            self.record(Sample(metric, labels, value))

    def observe(self, metric: Metric, labels: dict[str, str], value: float) -> None:
        """One observation of a histogram."""
        self.record(Sample(metric, labels, value))

    def _make(self, metric: Metric) -> Any:
        assert CATALOGUE[metric.name] is metric
        keys = ("service", *metric.labels)
        match metric.kind:
            case Kind.COUNTER:
                made = ray_metrics.Counter(metric.name, metric.help, keys)
            case Kind.GAUGE:
                made = ray_metrics.Gauge(metric.name, metric.help, keys)
            case Kind.HISTOGRAM:
                made = ray_metrics.Histogram(metric.name, metric.help, list(metric.buckets), keys)
        self._made[metric.name] = made.set_default_tags(self._service)
        return self._made[metric.name]


class CoordinatorExporter:
    """For the coordinator's actor: `heard` with every report, `export` about once a second."""

    def __init__(self, service: str = "tidegate") -> None:
        self._tally = Tally()
        self._recorder = Recorder(service)

    def heard(self, report: GroupReport) -> None:
        """A group's report has come."""
        self._tally.heard(report)

    def export(self, status: Mapping[str, Any], now: float = 0.0) -> None:
        """Record what `status`, the coordinator's own, says, and what the reports heard since the last call do."""
        for sample in self._tally.samples(status):
            self._recorder.record(sample)


class IngressMeter:
    """For an ingress: a `cluster.requests.meter.Meter` that records."""

    def __init__(self, service: str = "tidegate") -> None:
        self._recorder = Recorder(service)
        self._tenants = Bounded()
        self._reasons = Bounded(_REASONS)

    def accepted(self, labels: Labels, seconds: float) -> None:
        """A group has taken the request."""
        self._recorder.observe(meters.QUEUE, _request(labels), seconds)

    def first_token(self, labels: Labels, seconds: float) -> None:
        """The first token came."""
        self._recorder.observe(meters.TTFT, _request(labels), seconds)
        tenant = self._tenant(labels)
        self._recorder.count(meters.FIRST_TOKENS, tenant, 1)
        self._recorder.count(meters.TTFT_TOTAL, tenant, seconds)

    def next_tokens(self, labels: Labels, seconds: float, tokens: int) -> None:
        """More came: an observation for what they came with, per token."""
        self._recorder.observe(meters.INTER_TOKEN, _request(labels), seconds / max(1, tokens))

    def ended(self, labels: Labels, ending: Ending) -> None:
        """The request is over."""
        request, tenant, model = _request(labels), self._tenant(labels), {"model": labels.model}
        record = self._recorder
        reason = {"tenant": tenant["tenant"], "reason": self._reasons(ending.finish)}
        record.count(meters.ENDED, request | reason, 1)
        record.observe(meters.E2E, request, ending.seconds)
        record.observe(meters.PROMPT_LENGTH, request, ending.prompt_tokens)
        record.observe(meters.OUTPUT_LENGTH, request, ending.output_tokens)
        record.count(meters.TENANT_PROMPT, tenant, ending.prompt_tokens)
        record.count(meters.TENANT_CACHED, tenant, ending.cached_tokens)
        record.count(meters.TENANT_OUTPUT, tenant, ending.output_tokens)
        record.count(meters.REPLAYS, model, ending.replays)
        record.count(meters.DEATHS, model, ending.deaths)
        record.count(meters.POISONED, model, float(ending.poisoned))

    def _tenant(self, labels: Labels) -> dict[str, str]:
        return {"model": labels.model, "tenant": self._tenants(labels.tenant)}


def _request(labels: Labels) -> dict[str, str]:
    return {"model": labels.model, "class": labels.priority.name.lower()}
