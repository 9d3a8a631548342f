"""Metrics: the catalogue is whole and bounded, and every figure that a group or the coordinator tells has a metric."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import fields
from typing import Any

import pytest

from cluster import meters, samples
from cluster.coordination.cards import GroupCard, RankCard
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Share
from cluster.coordination.terms import CoordinatorTerms, LineBounds
from cluster.meters import CATALOGUE, LABELS, OTHER, Bounded, Kind, Metric
from cluster.samples import REPORT_COUNTERS, REPORT_GAUGES, STEP_COUNTERS, Sample, Tally
from kvstore.store import PoolReport
from tests.statuses import a_report, a_row, a_status
from workers.plan import GroupReport, StepRow
from workers.sequence import Priority

NOT_FIGURES = {"group", "epoch", "sequence", "step", "accepted", "voided", "live", "full", "sessions", "revision"}
"""Fields of a report that say who and which, not how much."""
TOLD_BY_STATUS = {"pool", "committed", "running", "waiting"}
SHAPED = {"steps", "request_blocks"}


def table(found: list[Sample]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.metric.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def total(found: list[Sample], metric: Metric) -> float:
    return sum(sample.value * sample.times for sample in found if sample.metric is metric)


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=CATALOGUE)
def test_every_metric_has_a_name_words_and_bounded_labels(metric: Metric) -> None:
    assert metric.name.startswith("tidegate_") and metric.name.islower() and ":" not in metric.name
    assert metric.help and not metric.help.endswith(".")
    assert set(metric.labels) <= set(LABELS) - {"service"}, "a label that nobody has shown to be bounded"
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets)) and all(bound > 0 for bound in metric.buckets)
    assert not metric.name.endswith("_total"), "Ray puts that behind counters"


def test_no_two_metrics_share_a_name() -> None:
    defined = [value for value in vars(meters).values() if isinstance(value, Metric)]
    assert len(CATALOGUE) == len(defined) > 50


def test_every_figure_of_a_report_has_a_metric() -> None:
    mapped = set(REPORT_COUNTERS) | set(REPORT_GAUGES)
    assert mapped | NOT_FIGURES | TOLD_BY_STATUS | SHAPED == {field.name for field in fields(GroupReport)}
    assert set(STEP_COUNTERS) | {"rows"} == {field.name for field in fields(StepRow)}


def test_every_count_of_a_report_arrives_under_its_metric() -> None:
    tally, report = Tally(), a_report()
    tally.heard(report)
    found = tally.samples(a_status())
    for field, metric in (REPORT_COUNTERS | REPORT_GAUGES).items():
        assert [s.value for s in found if s.metric is metric] == [getattr(report, field)], field
    for field, metric in STEP_COUNTERS.items():
        rows = {s.labels["rows"]: s.value for s in found if s.metric is metric}
        assert rows == {str(step.rows): getattr(step, field) for step in report.steps}


def test_peak_bytes_are_observed_once_per_request_at_their_size() -> None:
    tally = Tally()
    tally.heard(a_report(request_blocks=(0, 3, 0, 2)))
    peaks = [s for s in tally.samples(a_status()) if s.metric is meters.PEAK_BYTES]
    block = 2**20  # two ranks of 50 MiB each, a hundred blocks
    assert [(s.value, s.times) for s in peaks] == [(3 * block, 3), (12 * block, 2)]
    tally.heard(a_report(sequence=2, request_blocks=(0, 3, 0, 3)))
    (more,) = [s for s in tally.samples(a_status()) if s.metric is meters.PEAK_BYTES]
    assert (more.value, more.times) == (12 * block, 1)


IDENTITIES = {"epoch", "protocol", "pid", "rank", "revision"}
SETTINGS = {"max_num_seqs", "max_model_len", "blocks", "block_size", "threads"}
SAID_OTHERWISE = {
    "total": "the sum of the pool's states",
    "level_s": "from the changes of the level",
    "stages": "open grants by stage, over all groups",
    "groups": "from the groups' standings",
    "up": "from the groups' standings",
    "counters": "the sum of the groups' counters",
    "pool_bytes": "in the bytes that requests hold at most",
    "rows": "a label",
    "requests": "the sum over the classes",
    "longest_step_s": "from the report: latest",
    "request_blocks": "a histogram of bytes",
}
TAKEN = {*samples.ROW_GAUGES, *samples.STATES, *samples.CLOSED, *samples.LINE_CLASS, *samples.SERVICE_GAUGES}
TAKEN |= {*samples.MODEL_GAUGES, *REPORT_COUNTERS, *REPORT_GAUGES, *STEP_COUNTERS}
TAKEN |= {"levels", "changes", "drives", "grants", "refused", "tenants", "tenants_waiting", "full", "restarts"}


def figures(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The path of every number in a status."""
    if isinstance(value, dict):
        return {found for key, item in value.items() for found in figures(item, (*path, str(key)))}
    if isinstance(value, list):
        return {found for item in value for found in figures(item, path)}
    return {path} if isinstance(value, int | float) else set()


def a_real_status() -> dict[str, Any]:
    """Of a coordinator that has a group, requests that run and wait, and refusals."""
    coordinator = Coordinator(CoordinatorTerms(line=LineBounds(requests=3)), first_epoch=1, seed=1)
    rank = RankCard(rank=0, pid=1, node="n", threads=1, device="cpu", pool_bytes=2**20)
    epoch = coordinator.join(GroupCard("g0", ("m",), "a", 100, 32, 2, 512, 3200, (rank,)), 0.0)
    pool = PoolReport(total=100, free=100, held=0, idle=0, dirty=0, block_size=32)
    coordinator.report(a_report(epoch=epoch, pool=pool, committed=0, running=0, waiting=0, waiting_tokens=0), 0.1)
    asks = [Ask(f"r{n}", 0, "m", b"n", 32, 32, Priority(n % 2), share=Share(f"t{n}")) for n in range(9)]
    coordinator.place("ingress", asks, 0.2)
    return coordinator.status(1.0)


def test_every_figure_of_a_real_status_has_a_metric() -> None:
    status = a_real_status()
    assert status["line"]["m"]["requests"] == 3 and sum(status["refused"].values()) > 0, "the status says little"
    known = TAKEN | IDENTITIES | SETTINGS | set(SAID_OTHERWISE)
    untold = {path for path in figures(status) if not known & set(path)}
    assert not untold
    names = {part for path in figures(status) for part in path}
    assert set(SAID_OTHERWISE) <= names, "an excuse for a figure that there is not"
    assert Tally().samples(status)


def test_the_statuses_that_tests_are_made_of_look_like_real_ones() -> None:
    real, ours = a_real_status(), a_status()
    assert set(ours) - {"service", "url"} == set(real)
    assert set(a_row()) <= set(real["groups"][0])
    assert set(ours["line"]["m"]) == set(real["line"]["m"]) and set(ours["models"]["m"]) == set(real["models"]["m"])
    assert set(ours["line"]["m"]["classes"]["batch"]) == set(real["line"]["m"]["classes"]["batch"])


@pytest.mark.parametrize("seed", range(50))
def test_counters_add_up_to_what_happened_whatever_is_lost_or_restarted(seed: int) -> None:
    """A group's counter grows, its reports get lost, overtake each other, it is built anew, the coordinator forgets it
    and gives it another epoch: the sum is right as far as anybody was told."""
    rng = random.Random(seed)
    tally, truth, seen = Tally(), 0, 0.0
    epoch, restarts, sequence, count, told = 1, 0, 0, 0, 0
    late: list[GroupReport] = []
    for _ in range(300):
        event = rng.random()
        if event < 0.05:  # a new life; what its forerunner had not told yet is lost
            epoch, restarts, sequence, count, told = epoch + 1, restarts + 1, 0, 0, 0
        elif event < 0.1:  # the coordinator was restarted or had dropped the group
            epoch += 1
        count, sequence = count + rng.randint(0, 5), sequence + 1
        report = a_report(epoch=epoch, sequence=sequence, output_tokens=count)
        if event < 0.2:
            continue
        if event < 0.3:
            late.append(report)
            continue
        tally.heard(report)
        if late and event < 0.5:
            tally.heard(late.pop())  # overtaken: of no account
        if event < 0.8:  # else it is only told with a later one, or lost with its life
            truth, told = truth + count - told, count
            seen += total(tally.samples(a_status(a_row(epoch=epoch, restarts=restarts))), meters.OUTPUT_TOKENS)
    assert seen == truth


def test_a_coordinator_that_gives_a_living_group_a_new_epoch_counts_nothing_twice() -> None:
    tally = Tally()
    tally.heard(a_report(epoch=1, sequence=5, step=10, output_tokens=100))
    first = total(tally.samples(a_status()), meters.OUTPUT_TOKENS)
    tally.heard(a_report(epoch=2, sequence=6, step=12, output_tokens=130))
    assert (first, total(tally.samples(a_status(a_row(epoch=2))), meters.OUTPUT_TOKENS)) == (100, 30)


def test_a_report_of_a_life_that_the_status_does_not_show_waits() -> None:
    tally = Tally()
    tally.heard(a_report(epoch=1, output_tokens=100))
    tally.samples(a_status(a_row(epoch=1, restarts=0)))
    tally.heard(a_report(epoch=2, output_tokens=40))
    assert total(tally.samples(a_status(a_row(epoch=1, restarts=0))), meters.OUTPUT_TOKENS) == 0
    assert total(tally.samples(a_status(a_row(epoch=2, restarts=1))), meters.OUTPUT_TOKENS) == 40


def test_labels_stay_few_however_many_groups_come_and_go() -> None:
    tally, labels = Tally(), defaultdict(set)
    for life in range(100):
        rows = [a_row(f"{model}{life}-{n}", model) for n in range(3) for model in ("a", "b")]
        for row in rows:
            tally.heard(a_report(row["group"]))
        for sample in tally.samples(a_status(*rows)):
            labels[sample.metric.name].add(tuple(sorted(sample.labels.items())))
    assert labels["tidegate_running_requests"] == {
        (("group", str(n)), ("model", model)) for n in range(3) for model in ("a", "b")
    }
    assert max(map(len, labels.values())) <= 3 * 2 * 5, max(labels, key=lambda name: len(labels[name]))


def test_a_group_that_is_gone_shows_nothing_held() -> None:
    tally = Tally()
    tally.heard(a_report())
    tally.samples(a_status())
    left = [s for s in tally.samples(a_status(groups=[])) if s.labels.get("group") == "0"]
    gauges = {s.metric for s in left}
    assert {meters.BLOCKS, meters.RUNNING, meters.COMMITTED, meters.UNUSED_SLOTS, meters.STANDING} <= gauges
    assert all(s.value == 0 for s in left)


def test_a_group_that_takes_anothers_place_begins_its_counters_anew() -> None:
    tally = Tally()
    tally.heard(a_report("old", output_tokens=500))
    tally.samples(a_status(a_row("old")))
    tally.heard(a_report("new", output_tokens=20))
    found = tally.samples(a_status(a_row("new")))
    assert [(s.labels["group"], s.value) for s in found if s.metric is meters.OUTPUT_TOKENS] == [("0", 20)]


def test_counters_that_did_not_move_are_not_recorded() -> None:
    tally = Tally()
    tally.heard(a_report())
    tally.samples(a_status())
    assert not [s for s in tally.samples(a_status()) if s.metric.kind is not Kind.GAUGE]


def test_the_coordinators_own_figures_arrive() -> None:
    found = table(Tally().samples(a_status()))
    group = (("group", "0"), ("model", "m"))
    trim = (("group", "0"), ("level", "trim"), ("model", "m"))
    wanted = {
        ("tidegate_level", group): 1,
        ("tidegate_level_seconds", trim): 3.5,
        ("tidegate_level_changes", group): 3,
        ("tidegate_level_drive", (*group, ("term", "growth"))): 0.9,
        ("tidegate_group_restarts", group): 1,
        ("tidegate_blocks", (*group, ("state", "dirty"))): 5,
        ("tidegate_group_standing", (*group, ("state", "up"))): 1,
        ("tidegate_group_standing", (*group, ("state", "lapsed"))): 0,
        ("tidegate_line_requests", (("class", "interactive"), ("model", "m"))): 5,
        ("tidegate_line_oldest_seconds", (("class", "interactive"), ("model", "m"))): 12.5,
        ("tidegate_grants", (("stage", "void"),)): 1,
        ("tidegate_grants_given", ()): 50,
        ("tidegate_refusals", (("reason", "tenant_limit"),)): 3,
        ("tidegate_groups", (("model", "m"), ("state", "up"))): 1,
        ("tidegate_group_closed", (("group", "0"), ("model", "m"), ("reason", "reserved"))): 1,
        ("tidegate_line_served", (("class", "interactive"), ("model", "m"))): 21,
        ("tidegate_line_tenant_requests", (("model", "m"), ("tenant", "red"))): 4,
        ("tidegate_ingresses", ()): 2,
    }
    assert {key: found.get(key) for key in wanted} == wanted


def test_bounded_keeps_the_first_values_for_ever() -> None:
    bounded = Bounded(2)
    assert [bounded(value) for value in "abcab"] == ["a", "b", OTHER, "a", "b"]


def test_a_model_is_labelled_by_its_canonical_name_alone() -> None:
    facts = a_status()["models"]["m"]
    status = a_status(a_row(models=["m", "also"]), models={"m": facts, "also": facts})
    assert {s.labels["model"] for s in Tally().samples(status) if "model" in s.labels} == {"m"}


def test_tenants_that_left_the_line_show_nothing_waiting_and_newcomers_beyond_the_bound_are_one() -> None:
    tally, seen = Tally(), {}
    for life in range(30):
        status = a_status()
        status["line"]["m"]["tenants_waiting"] = {f"t{life}": 2, "other": 1}
        seen |= {s.labels["tenant"]: s.value for s in tally.samples(status) if s.metric is meters.LINE_TENANT}
    assert len(seen) == meters.TENANTS + 1
    assert {name for name, value in seen.items() if value} == {OTHER} and seen[OTHER] == 3
