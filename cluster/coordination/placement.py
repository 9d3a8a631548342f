"""Which group an ask goes to: one that can ever hold it, is up, has room, and is the least committed.

Pure functions over a view; nothing here changes it. What an ask costs is said here too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from cluster.coordination.grants import REFUSED_FULL, REFUSED_NEVER_FITS, REFUSED_NO_GROUP, Ask, Refusal
from cluster.coordination.view import GroupView

_load = attrgetter("load")

REJOIN_S = 1.0
"""What a client is told to wait when no group is up."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A group without a report for `lapse_s`, or without progress on its work for `stall_s`, gets nothing new. A full
    one still gets up to `queue_requests` requests beyond its slots and `queue_tokens` tokens beyond its pool, which
    wait in its engine."""

    lapse_s: float = 5.0
    stall_s: float = 30.0
    queue_requests: int = 256
    queue_tokens: int = 524_288

    def usable(self, group: GroupView, now: float) -> bool:
        """Whether new work may go there."""
        silent, stuck = now - group.reported_at > self.lapse_s, now - group.progressed_at > self.stall_s
        return not (group.leaving or silent or stuck)


@dataclass(frozen=True, slots=True)
class Full:
    """No room anywhere: about `tokens` must drain first."""

    tokens: int


def blocks_for(group: GroupView, ask: Ask, output: int) -> int:
    """Blocks that the prompt and `output` expected tokens take, never more than the pool has."""
    size = group.card.block_size
    return min(group.card.blocks, -(-(ask.prompt_tokens + output) // size))


def excess(group: GroupView, blocks: int, bounds: Bounds) -> int:
    """Tokens by which `blocks` and one slot more would overrun the group's queue; 0 when there is room."""
    card, ledger = group.card, group.ledger
    over = (ledger.committed + blocks - card.blocks) * card.block_size - bounds.queue_tokens
    if ledger.slots + 1 - card.max_num_seqs > bounds.queue_requests:
        over = max(over, blocks * card.block_size)
    return max(0, over)


def place(
    groups: Collection[GroupView], ask: Ask, output: int, bounds: Bounds, now: float
) -> GroupView | Full | Refusal:
    """The group for `ask`, or why there is none. O(groups); ties go to the first of `groups`."""
    need = ask.prompt_tokens + ask.max_tokens
    able = [group for group in groups if need <= group.longest]
    up = [group for group in able if bounds.usable(group, now)]
    if ask.avoid:
        up = [group for group in up if group.incarnation not in ask.avoid]
    if not up:
        return _never_fits(groups, ask) if groups and not able else _no_group(ask)
    best = min(up, key=_load)
    if ask.replay or not excess(best, blocks_for(best, ask, output), bounds):
        return best
    return _with_room(up, ask, output, bounds)


def _with_room(up: list[GroupView], ask: Ask, output: int, bounds: Bounds) -> GroupView | Full:
    """The least loaded is full: groups differ, so another may still have room."""
    over = [(excess(group, blocks_for(group, ask, output), bounds), group) for group in up]
    room = [group for tokens, group in over if not tokens]
    return min(room, key=_load) if room else Full(min(tokens for tokens, _ in over))


def refuse_full(ask: Ask, retry_after: float) -> Refusal:
    """Every group's queue is full."""
    message = f"Every group of model {ask.model!r} is full; try again in {retry_after:.0f} s."
    return Refusal(ask.request, ask.attempt, REFUSED_FULL, message, retry_after)


def _never_fits(groups: Collection[GroupView], ask: Ask) -> Refusal:
    largest = max(groups, key=lambda group: group.longest)
    card = largest.card
    message = (
        f"{ask.prompt_tokens} prompt tokens and max_tokens {ask.max_tokens} need "
        f"{ask.prompt_tokens + ask.max_tokens} tokens; the largest group holds {largest.longest} "
        f"(context {card.max_model_len}, pool {card.blocks} blocks of {card.block_size})."
    )
    return Refusal(ask.request, ask.attempt, REFUSED_NEVER_FITS, message)


def _no_group(ask: Ask) -> Refusal:
    message = f"No group of model {ask.model!r} that can hold the request is up."
    return Refusal(ask.request, ask.attempt, REFUSED_NO_GROUP, message, REJOIN_S)
