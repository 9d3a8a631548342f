"""The head's host dies and comes back with what Ray wrote there: group and ingress on the other host go on, streams do
not even pause, new requests are answered meanwhile, and a new coordinator learns of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.machine import physical_cores
from tests.ray.deployer import EVERYWHERE
from tests.ray.hosts import Pair, obstacle
from tests.ray.served import Deployer, Served, config

pytestmark = pytest.mark.slow

PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""What KubeRay tells workers: so long they wait for a head, where Ray by itself has them end after one minute."""


@pytest.fixture
def hosts() -> Iterator[Pair]:
    if why := obstacle():
        pytest.skip(why)
    pair = Pair()
    try:
        pair.first.boot(0, environment=kept(pair))
        pair.second.boot(physical_cores(), head=pair.first, environment=PATIENT)
        yield pair
    finally:
        pair.remove()


def kept(hosts: Pair) -> dict[str, str]:
    """Ray's state in RocksDB, where it outlives the head."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(hosts.folder / "gcs")}


@pytest.fixture
def served(hosts: Pair, tmp_path: Path, tiny_model: Path) -> Served:
    cache = {"TIDEGATE_CACHE": str(tmp_path)}
    return Served(hosts.second, Deployer(hosts.second, hosts.first, EVERYWHERE, config(tiny_model), cache))


def test_a_service_goes_on_while_its_head_is_away(hosts: Pair, served: Served) -> None:
    before = served.group()
    meanwhile: list[list[str]] = []

    def kill_and_boot() -> None:
        hosts.first.kill()
        meanwhile.append(served.answers())
        hosts.first.boot(0, environment=kept(hosts))

    assert served.answers(kill_and_boot) == served.expected
    assert meanwhile == [served.expected]
    after = served.wait_until_whole()
    assert after["restarts"] == before["restarts"] and after["ranks"] == before["ranks"], "the same group as before"
    assert served.answers() == served.expected
