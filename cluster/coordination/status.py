"""What the coordinator knows, as plain JSON values for people and programs. Changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from cluster.coordination.cards import PROTOCOL, Standing
from cluster.coordination.dispatch import Dispatch
from cluster.coordination.groupview import GroupView
from cluster.coordination.ledger import Stage
from cluster.coordination.view import View, counters
from workers.plan import GroupReport

TENANTS_SHOWN = 20
"""So many of the tenants that wait are named; the others are one number."""

Plain = dict[str, Any]


def status_of(view: View, dispatch: Dispatch, ingresses: int, now: float) -> Plain:
    """Keys: groups, models, line, grants, refused, sessions, counters (of all groups, ended ones included)."""
    stages: Counter[str] = Counter()
    totals = Counter(view.retired)
    rows = []
    for group in view.groups.values():
        stages.update(entry.stage.value for entry in group.ledger.open.values())
        if group.report is not None:
            totals.update(counters(group.report))
        rows.append(_group(view, group, now))
    names = list(view.serving)
    return {
        "protocol": PROTOCOL,
        "groups": rows,
        "models": {name: _model(view, dispatch, name, now) for name in names},
        "line": {model.name: _line(dispatch, model.name, now) for model in dispatch.models.values()},
        "grants": {stage.value: stages[stage.value] for stage in Stage} | {"given": dispatch.given},
        "refused": dict(dispatch.refused),
        "sessions": sum(row["sessions"] for row in rows),
        "counters": dict(totals),
        "ingresses": ingresses,
        "affinities": len(dispatch.placement.affinity),
        "beat_s": view.beat_s,
    }


def _model(view: View, dispatch: Dispatch, name: str, now: float) -> Plain:
    groups = view.serving[name].values()
    model = dispatch.model(name)
    tokens = model.experience.tokens
    return {
        "groups": len(groups),
        "up": sum(view.standing(group, now) is Standing.UP for group in groups),
        "expected_output_share": round(model.experience.share, 4),
        "expected_output_tokens": None if tokens is None else round(tokens, 1),
        "drained_tokens_per_s": round(model.drain.rate(now), 1),
        "waiting": len(model.line),
    }


def _line(dispatch: Dispatch, name: str, now: float) -> Plain:
    line = dispatch.models[name].line
    shown = dict(line.tenants.most_common(TENANTS_SHOWN))
    return {
        "requests": len(line),
        "tokens": line.tokens,
        "full": line.full,
        "tenants": len(line.tenants),
        "tenants_waiting": shown | {"other": len(line) - sum(shown.values())},
        "classes": {priority.name.lower(): queueing.at(now) for priority, queueing in line.classes.items()},
    }


def _group(view: View, group: GroupView, now: float) -> Plain:
    state = group.state(now, view.standing(group, now))
    card, pool, ladder = state.card, state.pool, group.ladder
    plain = {
        "group": card.group,
        "epoch": state.epoch,
        "state": "cordoned" if state.cordoned and not group.leaving else state.standing.value,
        "models": list(card.models),
        "revision": card.revision,
        "restarts": card.restarts,
        "settings": group.report.revision if group.report else 0,
        "load": round(state.load, 4),
        "committed": state.committed,
        "grants": state.grants,
        "stages": dict(Counter(entry.stage.value for entry in group.ledger.open.values())),
        "running": state.running,
        "waiting": state.waiting,
        "sessions": state.sessions,
        "reported_s": round(state.reported_s, 3),
        "progressed_s": round(state.progressed_s, 3),
        "max_num_seqs": card.max_num_seqs,
        "max_model_len": card.max_model_len,
        "blocks": card.blocks,
        "block_size": card.block_size,
        "pool": {name: getattr(pool, name) for name in ("total", "free", "held", "idle", "dirty")} if pool else None,
        "level": ladder.level.label,
        "level_s": round(ladder.lasted(now), 3),
        "levels": {name: round(seconds, 3) for name, seconds in ladder.seconds(now).items()},
        "changes": ladder.changes,
        "driven_by": ladder.term,
        "drives": {"held": round(ladder.signals.held, 4), "growth": round(ladder.signals.growth, 4)},
        "shrinks": ladder.shrinks,
        "reserved": group.reserved is not None,
        "alone": bool(group.alone),
        "ranks": [{name: getattr(rank, name) for name in rank.__slots__} for rank in card.ranks],
    }
    return plain | (_reported(group.report) if group.report else {})


def _reported(report: GroupReport) -> Plain:
    """What the group has counted, and the rest of its last report."""
    return counters(report) | {
        "waiting_tokens": report.waiting_tokens,
        "unused_slots": report.unused_slots,
        "longest_step_s": report.latest,
        "steps": [asdict(row) for row in report.steps],
        "request_blocks": list(report.request_blocks),
    }
