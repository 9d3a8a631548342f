"""Whether an answer would come if it were asked for now: from the groups as the coordinator sees them.

Asks the coordinator at most once a second, whoever wants to know. Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.coordination.cards import GroupState, Standing
from cluster.generation import GroupHealth, Health
from cluster.requests.directory import Directory

_log = logging.getLogger(__name__)

FRESH_S = 1.0


class Readiness:
    """`models` must each have a group that is up: it has reported, and makes progress on what it has to do."""

    def __init__(self, directory: Directory, models: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._directory = directory
        self._models = models
        self._clock = clock
        self._health: Health | None = None
        self._asked_at = 0.0
        self._asking = asyncio.Lock()

    async def health(self) -> Health:
        """The state of at most a second ago."""
        async with self._asking:
            if self._health is None or self._clock() - self._asked_at >= FRESH_S:
                self._health = await self._ask()
                self._asked_at = self._clock()
            return self._health

    async def _ask(self) -> Health:
        try:
            states = await self._directory.groups()
        except Exception as error:
            _log.warning("the coordinator did not answer: %r", error)
            return Health(False, "The coordinator does not answer.")
        return judge(states, self._models)


def judge(states: tuple[GroupState, ...], models: tuple[str, ...]) -> Health:
    """Ready when each model has a group that is up and has reported."""
    groups = tuple(_group_health(state) for state in states)
    up = {name for state, group in zip(states, groups, strict=True) if group.ready for name in state.card.models}
    missing = [model for model in models if model not in up]
    if not missing:
        return Health(True, groups=groups)
    return Health(False, f"No group of model {missing[0]!r} is ready ({len(states)} known).", groups)


def _group_health(state: GroupState) -> GroupHealth:
    name = state.card.group
    if state.pool is None:
        return GroupHealth(name, False, "has not reported yet")
    if state.standing is Standing.UP:
        return GroupHealth(name, True)
    reasons = {
        Standing.STALLED: f"no progress for {state.progressed_s:.0f} s",
        Standing.LAPSED: f"no report for {state.reported_s:.0f} s",
        Standing.LEAVING: "is cordoned" if state.cordoned else "is leaving",
    }
    return GroupHealth(name, False, reasons[state.standing])
