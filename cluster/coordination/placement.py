"""Which group an ask goes to: one that served something alike, if that is worth more than its load; else the least
loaded. Looks at a bounded number of groups, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.coordination.admission import blocks_for, can_hold, has_room, needed_tokens
from cluster.coordination.affinity import Affinity
from cluster.coordination.grants import REFUSED_NEVER_FITS, REFUSED_NO_GROUP, Ask, Refusal
from cluster.coordination.groupview import GroupView
from cluster.coordination.terms import Bounds
from cluster.coordination.view import View
from cluster.coordination.waiter import Waiter

REJOIN_S = 1.0
"""What a client is told to wait when no group is up."""
MOST_KEYS = 8
"""Of an ask's likenesses, so many are looked at."""
MOST_WORTH = 0.5
"""The share of a group's load that likeness makes up for at most, however long the prompt."""
LEAST_WORTH = 0.05
"""The same for a short prompt: a small difference of load is no reason to leave one's cache."""
WEAKER = 0.5
"""What each further likeness is worth, as a share of the one before."""


class Placement:
    """Reads `view`; remembers where what was served."""

    def __init__(self, view: View, bounds: Bounds) -> None:
        self.affinity = Affinity(bounds.affinity_s, bounds.affinity_keys)
        self._view = view

    def find(self, model: str, ask: Ask, output: int, now: float, waiter: Waiter | None = None) -> GroupView | None:
        """The group with room that `ask` should go to now. `model` is the name that its groups are listed under."""
        best: GroupView | None = None
        lowest = (0.0, 0)
        for group, tokens in self._candidates(model, ask, now):
            blocks = blocks_for(group, ask, output)
            if not can_hold(group, ask) or not has_room(group, ask, blocks, now, waiter):
                continue
            score = (group.load_with(blocks, ask.prompt_tokens, now) - _worth(group, tokens), group.number)
            if best is None or score < lowest:
                best, lowest = group, score
        return best

    def reservable(self, model: str, ask: Ask) -> GroupView | None:
        """The group that has least to finish before it can be kept free for `ask`."""
        groups = [
            group
            for group in self._view.roster.heads(model, needed_tokens(ask), ask.avoid)
            if group.reserved is None and not group.alone
        ]
        return min(groups, key=lambda group: (group.load, group.number), default=None)

    def obstacle(self, model: str, ask: Ask, now: float) -> Refusal | None:
        """Why waiting would not help: it never fits, or no group that can hold it is up."""
        largest = self._view.largest(model)
        if largest is not None and needed_tokens(ask) > largest.longest:
            return _never_fits(largest, ask)
        if next(self._view.roster.heads(model, needed_tokens(ask), ask.avoid), None) is not None:
            return None
        groups = self._view.serving.get(model, {}).values()
        if any(group.listed and can_hold(group, ask) for group in groups) or self._view.is_awaited(model, now):
            return None
        return no_group(ask)

    def is_lost(self, model: str, ask: Ask, now: float) -> bool:
        """Whether no known group, up or not, could ever run it, and none is on its way."""
        if any(can_hold(group, ask) for group in self._view.serving.get(model, {}).values()):
            return False
        return not self._view.is_awaited(model, now)

    def _candidates(self, model: str, ask: Ask, now: float) -> Iterator[tuple[GroupView, float]]:
        """Groups, and how many prompt tokens are probably cached there."""
        share = 1.0
        for key in ask.affinity[:MOST_KEYS]:
            group = self._alike(model, key, now)
            if group is not None:
                yield group, _cached(group, ask, share, now)
            share *= WEAKER
        for group in self._view.roster.heads(model, needed_tokens(ask), ask.avoid):
            yield group, 0.0

    def _alike(self, model: str, key: bytes, now: float) -> GroupView | None:
        found = self.affinity.group(key, now)
        if found is None:
            return None
        group = self._view.groups.get(found[0])
        if group is None or group.incarnation != found:
            self.affinity.forget(key)
            return None
        return group if group.listed and group.card.group in self._view.serving.get(model, {}) else None


def _cached(group: GroupView, ask: Ask, share: float, now: float) -> float:
    """What the group has told of this namespace, else a guess: `share` of the prompt."""
    blocks, _ = group.chains.cached(ask.namespace, now)
    guess = share * ask.prompt_tokens
    return min(guess, group.card.extent.cached_tokens(blocks)) if blocks and share == 1.0 else guess


def _worth(group: GroupView, tokens: float) -> float:
    """Prefill of `tokens` saved, as a share of what the group may have ahead of it."""
    return min(MOST_WORTH, LEAST_WORTH + tokens / group.backlog_limit) if tokens else 0.0


def _never_fits(largest: GroupView, ask: Ask) -> Refusal:
    card = largest.card
    message = (
        f"{ask.prompt_tokens} prompt tokens and max_tokens {ask.max_tokens} need {needed_tokens(ask)} tokens; the "
        f"largest group holds {largest.longest} (context {card.max_model_len}, pool {card.blocks} blocks of "
        f"{card.block_size})."
    )
    return Refusal(ask.request, ask.attempt, REFUSED_NEVER_FITS, message)


def no_group(ask: Ask) -> Refusal:
    """Nobody can run it now."""
    message = f"No group of model {ask.model!r} that can hold the request is up."
    return Refusal(ask.request, ask.attempt, REFUSED_NO_GROUP, message, REJOIN_S)
