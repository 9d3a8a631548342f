"""A second node of the stage's Ray, on this machine and on loopback like the first: what lies on it, and its end."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util.placement_group import placement_group_table

from deploy.cluster import OBJECT_STORE, RayLink
from tests.ray.stage import eventually


class SecondNode:
    """It has joined when this returns. (`ray start --address` refuses to where this machine counts as no cluster node,
    so its processes are started as Ray's own tests start theirs; they are children of this one.)"""

    def __init__(self, link: RayLink, cpus: int) -> None:
        parameters = RayParams(
            gcs_address=link.address,
            node_ip_address="127.0.0.1",
            num_cpus=cpus,
            num_gpus=0,
            object_store_memory=OBJECT_STORE,
            node_manager_port=0,
            min_worker_port=0,
            max_worker_port=0,
            include_log_monitor=False,
        )
        parameters.dashboard_agent_listen_port = None  # any: the first node has taken the usual one
        self._node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
        self._raylet = psutil.Process(self._node.all_processes["raylet"][0].process.pid)
        self.id = str(self._node.node_id)
        eventually(lambda: self.is_alive)

    @property
    def is_alive(self) -> bool:
        """Whether Ray counts it as alive."""
        return any(node["NodeID"] == self.id and node["Alive"] for node in ray.nodes())

    def give_notice(self, seconds: float) -> float:
        """Tell Ray that the node goes in so many seconds, as a cloud does before it takes back a spot machine; the
        deadline, on the monotonic clock."""
        deadline = int((time.time() + seconds) * 1000)
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        gcs = ray._private.worker.global_worker.gcs_client
        accepted, why_not = gcs.drain_node(self.id, reason, "the test takes it away", deadline)
        assert accepted, why_not
        return time.monotonic() + seconds

    def processes(self) -> list[psutil.Process]:
        """Its raylet and all that descends from it: agents and workers."""
        with suppress(psutil.NoSuchProcess):
            return [self._raylet, *self._raylet.children(recursive=True)]
        return []

    def runs(self, pid: int) -> bool:
        """Whether process `pid` is one of its workers."""
        return pid in {process.pid for process in self.processes()}

    def leftovers(self) -> list[str]:
        """The actors that live on it, and the placement groups that have a bundle there."""
        actors = [
            f"actor {actor['Name'] or name}"
            for name, actor in ray._private.state.actors().items()
            if actor["Address"]["NodeID"] == self.id and actor["State"] != "DEAD"
        ]
        places = [
            f"placement group {place['name'] or name}"
            for name, place in placement_group_table().items()
            if place["state"] != "REMOVED" and self.id in place["bundles_to_node_id"].values()
        ]
        return actors + places

    def kill(self) -> None:
        """Pull the plug: all its processes at once, without a word to anybody."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.take_away()

    def take_away(self) -> None:
        """End what still runs of it, and wait until it has ended."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
