"""`tidegate doctor` on a real Ray: it finds what a service left behind, removes that, and touches nothing else; and the
metrics arrive where Prometheus fetches them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from cluster.actors import open_coordinator
from cluster.meters import CATALOGUE
from cluster.registry import coordinator_services, end_coordinator
from cluster.settings import CoordinatorSettings
from deploy import inventory
from deploy.doctor import Finding, Verdict
from deploy.survey import look_at_ray
from tests.ray.stage import Stage, eventually

LEFT = "left-behind"
PLACE = f"{inventory.REPLICA}{LEFT}#group#abc"


@pytest.fixture
def left(tiny: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a service that was removed by hand leaves beside one that runs: its coordinator and a group's place."""
    monkeypatch.setattr(inventory, "YOUNG_S", 0.0)
    open_coordinator(CoordinatorSettings(LEFT, "config"))
    place = placement_group([{"CPU": 0.01}], name=PLACE, lifetime="detached")
    ray.get(place.ready(), timeout=30)
    yield
    end_coordinator(LEFT)
    remove_placement_group(place)


def places() -> set[str]:
    """Names of the placement groups that are there."""
    return {place["name"] for place in placement_group_table().values() if place["state"] != "REMOVED"}


def about_left(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if LEFT in finding.text]


def test_orphans_are_found_and_removed_and_a_running_service_is_left_alone(left: None, tiny: Stage) -> None:
    found = about_left(look_at_ray("here", fix=False))
    assert [finding.verdict for finding in found] == [Verdict.FAIL] * 2, found
    assert LEFT in coordinator_services() and PLACE in places(), "only told, not done"
    running, ours = tiny.groups(), places() - {PLACE}
    fixed = about_left(look_at_ray("here", fix=True))
    assert [finding.verdict for finding in fixed] == [Verdict.OK] * 2
    eventually(lambda: LEFT not in coordinator_services() and PLACE not in places(), 20)
    assert places() == ours
    assert [group["epoch"] for group in tiny.groups()] == [group["epoch"] for group in running]
    assert not about_left(look_at_ray("here", fix=False))
    assert tiny.complete("still there", max_tokens=3)["usage"]["completion_tokens"] == 3


def exported() -> str:
    """What Prometheus would fetch from the nodes."""
    nodes = (node for node in ray.nodes() if node["Alive"])
    return "\n".join(
        httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}", timeout=10).text for node in nodes
    )


def test_metrics_of_the_whole_service_arrive(tiny: Stage) -> None:
    tiny.complete("a request to count", max_tokens=20)
    wanted = ("blocks", "level", "steps_total", "output_tokens_total", "ttft_seconds_bucket", "requests_total")
    eventually(lambda: all(f"ray_tidegate_{name}{{" in exported() for name in wanted), 40)
    lines = [line for line in exported().splitlines() if line.startswith("ray_tidegate_")]
    names = {line.partition("{")[0].removeprefix("ray_") for line in lines}
    endings = ("_total", "_bucket", "_sum", "_count")
    known = {name + ending for name in CATALOGUE for ending in ("", *endings)}
    assert names <= known
    assert all('service="' in line for line in lines)  # other tests' coordinators are among them for a while
    assert {line.partition("{")[0] for line in lines if 'service="tidegate"' in line} >= {
        f"ray_tidegate_{name}" for name in wanted
    }
