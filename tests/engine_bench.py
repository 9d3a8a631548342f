"""An engine over shadow ranks with one ingress, and requests for it. Whoever uses it calls `turn`."""

from __future__ import annotations

from kvstore.store import KVStore
from tests.shadow import ShadowGroup
from workers.engine import Engine
from workers.errors import EngineRefused
from workers.outbox import Outbox
from workers.plan import GroupReport, Limits
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling

OWN = Limits(8, 64, 32)


def make(blocks: int = 32, depth: int = 1, group: ShadowGroup | None = None) -> tuple[Engine, Outbox]:
    scheduler = Scheduler(KVStore(blocks, 4, ttl=20.0), OWN, max_model_len=1000, watermark=0.0)
    engine = Engine(scheduler, group or ShadowGroup(blocks, 4), name="g", epoch=3, depth=depth, lease_s=1e9)
    return engine, engine.subscribe("i", lambda: None, 0.0)


def request(name: str, prompt: int = 8, output: int = 4, namespace: bytes = b"n", **fields: object) -> Request:
    return Request(name, tuple(range(prompt)), Sampling(output), namespace, **fields)  # type: ignore[arg-type]


def report(engine: Engine, now: float = 0.0) -> GroupReport:
    answer = engine.report()
    engine.turn(now)
    return answer.result(timeout=0)


def run(engine: Engine, now: float = 0.0) -> None:
    for _ in range(500):
        if engine.idle:
            return
        engine.turn(now)
    raise AssertionError("no end in sight")


def cached(box: Outbox) -> dict[str, int]:
    return {e.request: e.cached for m in iter(box.read, None) for e in m.events if e.finish}


def refused(engine: Engine, asked: Request) -> str | None:
    try:
        engine.submit("i", asked)
    except EngineRefused as refusal:
        return refusal.code
    return None
