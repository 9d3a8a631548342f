"""Coordinators' statuses and groups' reports with figures that tell each other apart, for whatever shows them."""

from __future__ import annotations

from typing import Any

from kvstore.store import PoolReport
from workers.plan import GroupReport, StepRow


def a_report(group: str = "g0", epoch: int = 1, sequence: int = 1, **changes: Any) -> GroupReport:
    """A report whose every count is a number of its own."""
    figures: dict[str, Any] = {
        "step": 1001,
        "pool": PoolReport(total=100, free=60, held=25, idle=10, dirty=5, block_size=32),
        "committed": 33,
        "running": 4,
        "waiting": 2,
        "waiting_tokens": 1003,
        "preemptions": 1004,
        "finished": 1005,
        "output_tokens": 1006,
        "prompt_tokens": 1007,
        "cached_tokens": 1008,
        "computed_tokens": 1009,
        "recomputed_tokens": 1010,
        "leaked": 1011,
        "ooms": 1012,
        "evicted": 1013,
        "expired": 1014,
        "expired_asked": 1015,
        "lost_to_scope": 1016,
        "unused_slots": 1017,
        "latest": 1018.5,
        "steps": (StepRow(4, 1019, 1020.5, 1021, 1022), StepRow(8, 1023, 1024.5, 1025, 1026)),
        "request_blocks": (0, 3, 0, 2),
    }
    return GroupReport(group=group, epoch=epoch, sequence=sequence, **(figures | changes))


def a_row(group: str = "g0", model: str = "m", **changes: Any) -> dict[str, Any]:
    """A group in a status."""
    ranks = [
        {
            "rank": n,
            "pid": 4711 + n,
            "node": "here",
            "threads": 2,
            "device": "cpu",
            "pool_bytes": 50 * 2**20,
            "block_bytes": 16 * 12_240,
            "kv": "30 layers of 3 × (64 int8 + 64 int8)",
            "kernel": "native-avx2",
            "kernel_why": "the fastest for this CPU",
        }
        for n in range(2)
    ]
    row: dict[str, Any] = {
        "group": group,
        "epoch": 1,
        "state": "up",
        "models": [model],
        "revision": "r",
        "load": 0.33,
        "committed": 33,
        "grants": 6,
        "running": 4,
        "waiting": 2,
        "sessions": 7,
        "reported_s": 0.25,
        "progressed_s": 0.125,
        "max_num_seqs": 8,
        "max_model_len": 4096,
        "blocks": 100,
        "block_size": 32,
        "restarts": 1,
        "pool": {"total": 100, "free": 60, "held": 25, "idle": 10, "dirty": 5},
        "ranks": ranks,
        "level": "trim",
        "level_s": 3.5,
        "levels": {"normal": 10.0, "trim": 3.5},
        "changes": 3,
        "driven_by": "growth",
        "shrinks": False,
        "reserved": True,
        "alone": False,
        "drives": {"held": 0.25, "growth": 0.9},
        "preemptions": 9,
        "output_tokens": 1000,
        "prompt_tokens": 400,
        "cached_tokens": 100,
        "recomputed_tokens": 30,
        "computed_tokens": 1300,
    }
    return row | changes


def a_status(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A status with these groups."""
    waiting = {"waiting": 5, "tokens": 640, "oldest_s": 12.5, "median_s": 6.5, "served": 21, "served_wait_s": 44.0}
    model = {"groups": 1, "up": 1, "expected_output_share": 0.5, "expected_output_tokens": None, "waiting": 5}
    line = {
        "requests": 5,
        "tokens": 640,
        "full": False,
        "tenants": 2,
        "tenants_waiting": {"red": 4, "blue": 1, "other": 0},
        "classes": {"interactive": waiting, "batch": dict.fromkeys(waiting, 0)},
    }
    status: dict[str, Any] = {
        "service": "tidegate",
        "url": "http://here:1",
        "protocol": 2,
        "groups": list(rows or (a_row(),)),
        "models": {"m": model | {"drained_tokens_per_s": 70.0}},
        "grants": {"granted": 2, "accepted": 4, "void": 1, "given": 50},
        "refused": {"cluster_full": 8, "tenant_limit": 3},
        "line": {"m": line},
        "sessions": 7,
        "counters": {},
        "ingresses": 2,
        "affinities": 90,
        "revision": {"number": 1, "digest": "0f", "undone": False, "earlier": 0},
        "ingress_settings": [],
        "maintenance": {},
        "beat_s": 0.5,
    }
    return status | changes
