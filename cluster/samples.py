"""From what groups report and the coordinator says to samples of the catalogue's metrics. Pure: no clock, no Ray.

Groups count from their start and may be replaced; counters only ever grow. So what is sampled of a counter is what it
has grown by, and a group that begins anew begins at nothing. A group's label is its place among those of its model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster import meters
from cluster.coordination.cards import Standing
from cluster.meters import Kind, Metric
from workers.plan import GroupReport

REPORT_COUNTERS = {
    "preemptions": meters.PREEMPTIONS,
    "finished": meters.FINISHED,
    "output_tokens": meters.OUTPUT_TOKENS,
    "prompt_tokens": meters.PROMPT_TOKENS,
    "cached_tokens": meters.CACHED_TOKENS,
    "computed_tokens": meters.COMPUTED_TOKENS,
    "recomputed_tokens": meters.RECOMPUTED_TOKENS,
    "leaked": meters.LEAKED,
    "ooms": meters.DROPPED_STEPS,
    "evicted": meters.EVICTED,
    "expired": meters.EXPIRED,
    "expired_asked": meters.EXPIRED_ASKED,
    "lost_to_scope": meters.LOST_TO_SCOPE,
}
"""Field of a GroupReport -> the counter that it feeds."""
REPORT_GAUGES = {
    "waiting_tokens": meters.WAITING_TOKENS,
    "unused_slots": meters.UNUSED_SLOTS,
    "latest": meters.LONGEST_STEP,
}
STEP_COUNTERS = {
    "steps": meters.STEPS,
    "seconds": meters.STEP_SECONDS,
    "sampled": meters.STEP_SAMPLED,
    "computed": meters.STEP_COMPUTED,
}
"""Field of a StepRow -> the counter that it feeds."""
ROW_GAUGES = {
    "committed": meters.COMMITTED,
    "grants": meters.OPEN_GRANTS,
    "running": meters.RUNNING,
    "waiting": meters.WAITING,
    "sessions": meters.SESSIONS,
    "load": meters.LOAD,
    "reported_s": meters.REPORT_AGE,
    "progressed_s": meters.PROGRESS_AGE,
}
"""Key of a group in the coordinator's status -> its gauge."""
LINE_CLASS = {
    "waiting": meters.LINE_REQUESTS,
    "tokens": meters.LINE_TOKENS,
    "oldest_s": meters.LINE_AGE,
    "median_s": meters.LINE_MEDIAN,
    "served": meters.LINE_SERVED,
    "served_wait_s": meters.LINE_WAITED,
}
"""Key of a class in the status of a line -> its metric."""
SERVICE_GAUGES = {"ingresses": meters.INGRESSES, "affinities": meters.AFFINITIES, "beat_s": meters.BEAT}
MODEL_GAUGES = {
    "drained_tokens_per_s": meters.DRAIN_RATE,
    "expected_output_share": meters.OUTPUT_SHARE,
    "expected_output_tokens": meters.OUTPUT_EXPECTED,
}
CLOSED = ("shrinks", "reserved", "alone")
"""Keys of a group that say why it gets nothing new."""
STATES = ("held", "idle", "free", "dirty")
LEVELS = ("normal", "trim", "shrink", "compact", "refuse")

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing to record: a gauge's value, what a counter has grown by, or `times` observations of `value`."""

    metric: Metric
    labels: Labels
    value: float
    times: int = 1


class Tally:
    """Keeps each group's last report and what was counted so far. Group names come and go, labels stay few."""

    def __init__(self) -> None:
        self._reports: dict[str, GroupReport] = {}
        self._counted: dict[tuple[str, ...], float] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._epochs: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._reasons = meters.Bounded()
        self._tenants = meters.Bounded()
        self._queued: dict[str, set[str]] = {}

    def heard(self, report: GroupReport) -> None:
        """Take in a report: as cheap as can be, since it stands on the way of every heartbeat. One that was overtaken
        by a later one counts for nothing."""
        last = self._reports.get(report.group)
        if last is None or (report.epoch, report.sequence) > (last.epoch, last.sequence):
            self._reports[report.group] = report

    def samples(self, status: Mapping[str, Any]) -> list[Sample]:
        """Everything to record now, from the coordinator's `status` and the reports heard."""
        rows = {row["group"]: row for row in status["groups"]}
        found = [*self._leave(rows), *self._service(status)]
        for name, row in rows.items():
            model, place = self._place(name, row["models"][0] if row["models"] else "")
            labels = {"model": model, "group": str(place)}
            report = self._reports.get(name)
            if report is not None:
                found += self._group(report, row, labels)
            found += self._standing(name, row, labels)
        return [sample for sample in found if sample.metric.kind is not Kind.COUNTER or sample.value > 0]

    # -- groups that come and go --------------------------------------------------------------------------------------

    def _place(self, name: str, model: str) -> tuple[str, int]:
        """The lowest place of the model that no other group has."""
        if name not in self._places:
            taken = {place for owner, place in self._places.values() if owner == model}
            self._places[name] = (model, next(place for place in range(len(taken) + 1) if place not in taken))
        return self._places[name]

    def _leave(self, rows: Mapping[str, object]) -> Iterator[Sample]:
        """What to show of groups that are gone: nothing held, nothing running."""
        for name in [name for name in self._places if name not in rows]:
            model, place = self._places.pop(name)
            labels = {"model": model, "group": str(place)}
            for metric in (*ROW_GAUGES.values(), *REPORT_GAUGES.values(), meters.LEVEL):
                yield Sample(metric, labels, 0.0)
            yield from (Sample(meters.BLOCKS, labels | {"state": state}, 0.0) for state in STATES)
            yield from (Sample(meters.STANDING, labels | {"state": one.value}, 0.0) for one in Standing)
            yield from (Sample(meters.DRIVE, labels | {"term": term}, 0.0) for term in ("held", "growth"))
            self._reports.pop(name, None)
            self._epochs.pop(name, None)
            self._lives.pop(name, None)
            self._forget(name)

    def _forget(self, *prefix: str) -> None:
        for key in [key for key in self._counted if key[: len(prefix)] == prefix]:
            del self._counted[key]

    def _grown(self, value: float, *key: str) -> float:
        """By how much the counter at `key` has grown; one that is lower than before began anew."""
        before = self._counted.get(key, 0.0)
        self._counted[key] = value
        return value - before if value >= before else value

    # -- one group ----------------------------------------------------------------------------------------------------

    def _group(self, report: GroupReport, row: Mapping[str, Any], labels: Labels) -> Iterator[Sample]:
        """What the report says. Its counters go on under a new epoch, and begin anew when the group was built anew."""
        if report.epoch == row["epoch"]:
            if self._lives.get(report.group, row["restarts"]) != row["restarts"]:
                self._forget(report.group, "own")
            self._lives[report.group] = row["restarts"]
            self._epochs[report.group] = report.epoch
        elif report.epoch != self._epochs.get(report.group):
            return  # of a life that the status does not show yet, or any more
        for field, metric in REPORT_COUNTERS.items():
            yield Sample(metric, labels, self._grown(getattr(report, field), report.group, "own", field))
        for field, metric in REPORT_GAUGES.items():
            yield Sample(metric, labels, getattr(report, field))
        for step in report.steps:
            for field, metric in STEP_COUNTERS.items():
                grown = self._grown(getattr(step, field), report.group, "own", field, str(step.rows))
                yield Sample(metric, labels | {"rows": str(step.rows)}, grown)
        yield from self._peaks(report, row, labels)

    def _peaks(self, report: GroupReport, row: Mapping[str, Any], labels: Labels) -> Iterator[Sample]:
        """Peak bytes of requests that ended, from a histogram over powers of two of blocks."""
        size = sum(rank["pool_bytes"] for rank in row["ranks"]) / max(1, row["blocks"])
        for power, count in enumerate(report.request_blocks):
            grown = int(self._grown(count, report.group, "own", "request_blocks", str(power)))
            if grown:
                yield Sample(meters.PEAK_BYTES, {"model": labels["model"]}, 1.5 * 2**power * size, grown)

    def _standing(self, name: str, row: Mapping[str, Any], labels: Labels) -> Iterator[Sample]:
        """What the coordinator says of a group."""
        for key, metric in ROW_GAUGES.items():
            yield Sample(metric, labels, row[key])
        for state in STATES if row["pool"] else ():
            yield Sample(meters.BLOCKS, labels | {"state": state}, row["pool"][state])
        for one in Standing:
            yield Sample(meters.STANDING, labels | {"state": one.value}, float(row["state"] == one.value))
        for reason in CLOSED:
            yield Sample(meters.CLOSED, labels | {"reason": reason}, float(row[reason]))
        yield Sample(meters.RESTARTS, labels, self._grown(row["restarts"], name, "restarts"))
        yield from self._ladder(name, row, labels)

    def _ladder(self, name: str, row: Mapping[str, Any], labels: Labels) -> Iterator[Sample]:
        yield Sample(meters.LEVEL, labels, LEVELS.index(row["level"]))
        for level, seconds in row["levels"].items():
            grown = self._grown(seconds, name, "levels", level)
            yield Sample(meters.LEVEL_SECONDS, labels | {"level": level}, grown)
        yield Sample(meters.LEVEL_CHANGES, labels, self._grown(row["changes"], name, "changes"))
        for term, share in row["drives"].items():
            yield Sample(meters.DRIVE, labels | {"term": term}, share)

    # -- the whole service --------------------------------------------------------------------------------------------

    def _service(self, status: Mapping[str, Any]) -> Iterator[Sample]:
        for key, metric in SERVICE_GAUGES.items():
            yield Sample(metric, {}, status[key])
        for stage, count in status["grants"].items():
            if stage == "given":
                yield Sample(meters.GRANTED, {}, self._grown(count, "", "given"))
            else:
                yield Sample(meters.GRANTS, {"stage": stage}, count)
        for code, count in status["refused"].items():
            yield Sample(meters.REFUSED, {"reason": self._reasons(code)}, self._grown(count, "", "refused", code))
        aliases = {name for row in status["groups"] for name in row["models"][1:]}
        for model, facts in status["models"].items():
            if model in aliases:
                continue  # the same groups under another name
            for key, metric in MODEL_GAUGES.items():
                if facts[key] is not None:
                    yield Sample(metric, {"model": model}, facts[key])
            yield from _standings(model, status["groups"])
        for model, line in status["line"].items():
            yield from self._line(model, line)

    def _line(self, model: str, line: Mapping[str, Any]) -> Iterator[Sample]:
        yield Sample(meters.LINE_TENANTS, {"model": model}, line["tenants"])
        yield Sample(meters.LINE_FULL, {"model": model}, float(line["full"]))
        for name, facts in line["classes"].items():
            labels = {"model": model, "class": name}
            for key, metric in LINE_CLASS.items():
                value = facts[key]
                if metric.kind is Kind.COUNTER:
                    value = self._grown(value, "", "line", model, name, key)
                yield Sample(metric, labels, value)
        waiting: dict[str, float] = dict.fromkeys(self._queued.get(model, ()), 0.0)
        for tenant, count in line["tenants_waiting"].items():
            tenant = self._tenants(tenant) if tenant != meters.OTHER else tenant
            waiting[tenant] = waiting.get(tenant, 0.0) + count
        self._queued[model] = set(waiting)
        yield from (Sample(meters.LINE_TENANT, {"model": model, "tenant": name}, n) for name, n in waiting.items())


def _standings(model: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    states = [row["state"] for row in rows if model in row["models"]]
    for one in Standing:
        yield Sample(meters.GROUPS, {"model": model, "state": one.value}, states.count(one.value))
