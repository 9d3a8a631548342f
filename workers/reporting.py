"""The group's report, put together from its scheduler and store. Cheap: one walk over live sequences."""

from __future__ import annotations

from dataclasses import asdict

from workers.plan import GroupReport
from workers.scheduler import Scheduler


def unused_slots(scheduler: Scheduler) -> int:
    """Token slots of held blocks that hold no token (yet): of the prompt part that is not computed, and of last blocks.
    Shared blocks are full."""
    size = scheduler.store.block_size
    tables = ((s.table, s.computed) for s in scheduler.running if s.table)
    return sum(max(0, len(blocks) * size - computed) for table, computed in tables for blocks in table.blocks)


def make_report(
    scheduler: Scheduler,
    now: float,
    *,
    group: str,
    epoch: int,
    sequence: int,
    committed: int,
    grants: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
    full: bool,
    revision: int = 0,
) -> GroupReport:
    """`grants` are those accepted, voided (both since the last report) and live; `revision` that of the settings which
    are in force. Begins a new period for what counts since the last report."""
    store, steps = scheduler.store, scheduler.steps
    accepted, voided, live = grants
    changes = store.sessions.changes(now)
    latest, steps.latest = steps.latest, 0.0
    return GroupReport(
        group=group,
        epoch=epoch,
        sequence=sequence,
        step=scheduler.step,
        pool=store.report(),
        committed=committed,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        waiting_tokens=scheduler.waiting.tokens,
        accepted=accepted,
        voided=voided,
        live=live,
        full=full,
        sessions=store.sessions.rows(now) if full else changes,
        leaked=store.leaked,
        evicted=store.evictions,
        expired=store.expirations,
        unused_slots=unused_slots(scheduler),
        latest=latest,
        steps=steps.rows(),
        request_blocks=tuple(scheduler.request_blocks.counts),
        revision=revision,
        **asdict(scheduler.counters),
    )
