"""The groups as the coordinator last told them, kept for when it does not answer: then known groups take new work under
their own limits.

An ingress gives itself a grant to the least loaded group that is up; the group's engine decides. Knows no request's
state.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from cluster.coordination.cards import GroupState, Standing
from cluster.coordination.grants import Ask, Grant, Incarnation
from cluster.requests.ports import CoordinatorPort

_log = logging.getLogger(__name__)

KNOWN_S = 60.0
"""For how long what the coordinator said of its groups is good enough to go by."""
REFRESH_S = 5.0
"""How old it may be while the coordinator answers."""
SUBMIT_S = 5.0
"""How long such a grant holds. (Nobody enforces it; the coordinator's own say as much.)"""


class Directory:
    """`clock` is monotonic, in seconds."""

    def __init__(self, coordinator: CoordinatorPort, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._states: tuple[GroupState, ...] = ()
        self._learned_at = float("-inf")
        self._asking = False
        self._given: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()

    async def groups(self) -> tuple[GroupState, ...]:
        """All groups, asked for now; whatever a failed call raises."""
        states = await self._coordinator.groups()
        self._states, self._learned_at = states, self._clock()
        self._given.clear()
        return states

    @property
    def stale(self) -> bool:
        """Whether it is time to ask again, and nobody does."""
        return not self._asking and self._clock() - self._learned_at >= REFRESH_S

    async def refresh(self) -> None:
        """Ask the coordinator, if it answers."""
        self._asking = True
        try:
            await self.groups()
        except Exception as error:
            _log.info("the groups cannot be looked up: %r", error)
        finally:
            self._asking = False

    def grant(self, ask: Ask, tried: set[Incarnation]) -> Grant | None:
        """A grant without an id for `ask`, in the coordinator's absence; None when no group is known that could take
        it. Notes the group in `tried`: each is tried once. What must run alone waits: only the coordinator can tell."""
        if ask.alone or self._clock() - self._learned_at > KNOWN_S:
            return None
        fit = [state for state in self._states if _may_take(state, ask) and _incarnation(state) not in tried]
        if not fit:
            return None
        state = min(fit, key=self._burden)
        card = state.card
        tried.add(_incarnation(state))
        self._given[card.group] += 1
        self._turns[card.group] = max(self._turns.values(), default=0) + 1
        blocks = card.extent.blocks_for(ask.prompt_tokens + ask.max_tokens)
        return Grant("", ask.request, ask.attempt, card.group, state.epoch, card.address, blocks, SUBMIT_S)

    def _burden(self, state: GroupState) -> tuple[float, int]:
        """Its load when it was last known and what it was sent since, in shares of it; then who had its turn last."""
        group = state.card.group
        return state.load + self._given[group] / state.card.max_num_seqs, self._turns[group]


def _may_take(state: GroupState, ask: Ask) -> bool:
    return (
        state.standing is Standing.UP
        and ask.model in state.card.models
        and _incarnation(state) not in ask.avoid
        and ask.prompt_tokens + ask.max_tokens <= state.card.longest
    )


def _incarnation(state: GroupState) -> Incarnation:
    return state.card.group, state.epoch
