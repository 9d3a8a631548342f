"""When the node goes on which this process runs, where Ray has been told so (a spot machine that is taken back). Knows
nothing of what runs there."""

from __future__ import annotations

import time

import ray

ASK_S = 2.0


def seconds_left() -> float | None:
    """Until this node's deadline, below 0 behind it (Ray ends nothing by itself then); None where nobody has given
    notice, or none with a deadline. The deadline is of the wall clock of whoever gave it. Blocks for a call to Ray;
    raises RayError when that fails."""
    draining: dict[str, int] = ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=ASK_S)
    deadline_ms = draining.get(ray.get_runtime_context().get_node_id(), 0)
    return deadline_ms / 1000 - time.time() if deadline_ms else None
