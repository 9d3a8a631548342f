"""Whether a group has room for an ask: blocks, a sequence slot, prefill backlog. Pure functions; nothing is changed."""

from __future__ import annotations

from cluster.coordination.grants import Ask
from cluster.coordination.groupview import GroupView
from cluster.coordination.waiter import Waiter
from workers.sequence import Priority


def needed_tokens(ask: Ask) -> int:
    """Tokens of the sequence if it generates all it may."""
    return ask.prompt_tokens + ask.max_tokens


def blocks_for(group: GroupView, ask: Ask, output: int) -> int:
    """Blocks that the prompt and `output` expected tokens take, never more than the pool has."""
    return min(group.card.blocks, group.card.extent.blocks_for(ask.prompt_tokens + output))


def can_hold(group: GroupView, ask: Ask) -> bool:
    """Whether it could ever run there."""
    return needed_tokens(ask) <= group.longest and group.incarnation not in ask.avoid


def preempts(group: GroupView, ask: Ask) -> bool:
    """Whether something runs there that makes way for it: its engine preempts batch work for interactive work."""
    return bool(group.ledger.batch) and ask.priority is Priority.INTERACTIVE


def has_room(group: GroupView, ask: Ask, blocks: int, now: float, waiter: Waiter | None = None) -> bool:
    """Whether it may go there now. With nothing else live (or only what makes way for it) it may have the whole group:
    watermark and levels waived. `waiter` is its place in the line, if it has one: a group may be kept free for it."""
    if group.alone:
        return False
    ledger = group.ledger
    if not ask.alone and _is_welcome(group, ask, blocks):
        return True
    if not _may_have(group, ask, waiter):
        return False
    if not ledger.slots:
        return True
    if ask.alone:
        return False
    if group.ladder.shrinks and not ask.replay:
        return False
    if preempts(group, ask):
        slots, committed, steps = ledger.slots - ledger.batch, ledger.committed_ahead, 2
        if not slots:
            return True
    else:
        slots, committed, steps = ledger.slots, ledger.committed, 1
    promised = ask.replay or (waiter is not None and group.reserved is waiter)
    kept = 0 if promised else group.guests.kept_from(ask.share.tenant, now)
    if slots >= group.slot_limit - bool(kept) or committed + blocks > group.block_limit - kept:
        return False
    backlog = group.backlog(now)
    return not backlog or backlog + ask.prompt_tokens <= steps * group.backlog_limit


def overbooked(group: GroupView, ask: Ask, blocks: int) -> int:
    """Of the `blocks` that it is given there, those that are committed to batch work."""
    if not preempts(group, ask):
        return 0
    return min(blocks, max(0, group.ledger.committed + blocks - group.block_limit))


def _is_welcome(group: GroupView, ask: Ask, blocks: int) -> bool:
    """Whether it may come as a guest, however much the others there will still grow: its blocks are free now, and what
    all guests take together is bounded."""
    guests = group.guests
    if not guests.is_guest(ask.share.tenant) or not guests.admits(blocks):
        return False
    return group.ledger.slots < group.seqs and group.occupied + blocks <= group.card.blocks


def _may_have(group: GroupView, ask: Ask, waiter: Waiter | None) -> bool:
    """A group that is kept free is so against its like: a better class goes first all the same."""
    reserved = group.reserved
    band = waiter.band if waiter else ask.priority
    return reserved is None or reserved is waiter or band < reserved.band


def is_open(group: GroupView, best: Priority) -> bool:
    """Whether anything at all of class `best` or below could have room there: worth looking at a line for."""
    ledger = group.ledger
    if group.alone:
        return False
    if group.guests.expected:
        return True
    if best is Priority.INTERACTIVE and ledger.batch:
        return ledger.slots - ledger.batch < group.slot_limit and ledger.committed_ahead < group.block_limit
    return not ledger.slots or (ledger.slots < group.slot_limit and ledger.committed < group.block_limit)
