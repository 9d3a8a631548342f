"""One group over two hosts: it serves; the link between them is cut and mended; the second host dies and comes back.
Streams pause and go on with the same text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.bundles import group_bundles
from deploy.machine import physical_cores
from tests import manifests
from tests.ray.deployer import ALONE
from tests.ray.hosts import Pair, obstacle
from tests.ray.served import Deployer, Served, config
from tests.ray.stage import eventually

pytestmark = pytest.mark.slow

STEP_S = 4.0
"""After so long without a step's end a group counts as hung."""
SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "4"}
"""A host that is gone is missed within seconds, not within most of a minute."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    if why := obstacle():
        pytest.skip(why)
    pair = Pair()
    try:
        pair.first.boot(one_rank(), environment=SOON)
        pair.second.boot(one_rank(), head=pair.first, environment=SOON)
        yield pair
    finally:
        pair.remove()


@pytest.fixture(scope="module")
def served(hosts: Pair, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Served:
    cache = {"TIDEGATE_CACHE": str(tmp_path_factory.mktemp("cache"))}
    over_both = config(tiny_model, tensor_parallel_size=2, placement="nodes", step_timeout_s=STEP_S)
    return Served(hosts.first, Deployer(hosts.first, hosts.first, ALONE, over_both, cache))


def one_rank() -> int:
    """CPUs of a host that has room for one rank of two, and for no more."""
    rank = group_bundles(2, device="cpu", cores=physical_cores(), all_ranks=2)[1]["CPU"]
    return int(rank) + 1


def is_on_both(group: dict[str, Any], hosts: Pair) -> bool:
    return sorted(rank["node"] for rank in group["ranks"]) == [hosts.first.address, hosts.second.address]


def test_the_ranks_are_on_different_hosts(hosts: Pair, served: Served) -> None:
    assert is_on_both(served.group(), hosts)
    assert all(served.expected)


def test_the_probes_of_the_pods_are_answered(hosts: Pair, served: Served) -> None:
    """Without a token: whoever probes has none. Serve's proxy is on the first host alone here."""
    pods = next(manifests.walk(yaml.safe_load((manifests.KUBERAY / "base" / "service.yaml").read_text()), "spec"))
    probes = {
        (host.address, probe["port"], probe["path"])
        for host in (hosts.first, hosts.second)
        for probe in manifests.walk(pods, "httpGet")
        if probe["port"] != 8000 or host is hosts.first
    }
    assert len(probes) == 5
    with hosts.first.clients(1) as pool:
        for address, port, path in probes:
            url = f"http://{'127.0.0.1' if port == 8000 else address}:{port}{path}"
            answer = pool.submit(httpx.get, url, timeout=10).result()
            assert answer.status_code == 200, f"{url}: {answer.text}"


def test_a_group_is_built_anew_when_a_cut_link_is_back(hosts: Pair, served: Served) -> None:
    epoch = served.group()["epoch"]

    def cut_and_mend() -> None:
        hosts.cut()
        try:
            eventually(lambda: served.group()["state"] != "up")
        finally:
            hosts.mend()

    assert served.answers(cut_and_mend) == served.expected
    group = served.wait_until_whole()
    assert is_on_both(group, hosts) and group["epoch"] > epoch


def test_a_group_is_built_anew_when_a_dead_host_is_back(hosts: Pair, served: Served) -> None:
    epoch = served.group()["epoch"]

    def kill_and_boot() -> None:
        hosts.second.kill()
        hosts.second.boot(one_rank(), head=hosts.first, environment=SOON)

    assert served.answers(kill_and_boot) == served.expected
    group = served.wait_until_whole()
    assert is_on_both(group, hosts) and group["epoch"] > epoch
