"""What the coordinator believes and since when: groups, their commitments and cached sessions, who holds which grant.

The group is the truth, this is a view of it. Decides nothing and knows no clock.
"""

from __future__ import annotations

import heapq
from collections import deque

from cluster.coordination.cards import GroupCard, GroupState, Standing
from cluster.coordination.chains import Chains
from cluster.coordination.grants import Incarnation
from cluster.coordination.ledger import Ledger, OpenGrant, Stage
from workers.plan import GroupReport

BACKLOG_STEPS = 8
"""A prefill backlog of so many full steps counts as a full group."""


class GroupView:
    """One incarnation of a group. `load` is its fullest resource as a share: blocks, slots, prefill backlog."""

    def __init__(self, card: GroupCard, epoch: int, now: float) -> None:
        self.card = card
        self.epoch = epoch
        self.ledger = Ledger()
        self.chains = Chains()
        self.report: GroupReport | None = None
        self.reported_at = now
        self.progressed_at = now
        self.leaving = False
        self.longest = card.longest
        self.load = 0.0

    @property
    def incarnation(self) -> Incarnation:
        return (self.card.group, self.epoch)

    def standing(self, now: float, lapse_s: float, stall_s: float) -> Standing:
        """Whether it takes new work: reports keep coming, and steps advance while there is work."""
        if self.leaving:
            return Standing.LEAVING
        if now - self.reported_at > lapse_s:
            return Standing.LAPSED
        return Standing.STALLED if now - self.progressed_at > stall_s else Standing.UP

    def refresh(self) -> None:
        """Compute `load` anew: call after every change of the ledger."""
        card, ledger = self.card, self.ledger
        backlog = ledger.fresh_tokens + (self.report.waiting_tokens if self.report else 0)
        self.load = max(
            ledger.committed / card.blocks,
            ledger.slots / card.max_num_seqs,
            backlog / (card.max_num_batched_tokens * BACKLOG_STEPS),
        )

    def take(self, report: GroupReport, now: float) -> list[OpenGrant]:
        """Take in a report; an older one than the last counts for nothing. Returns the grants that ended by it."""
        last = self.report
        if last is not None and report.sequence <= last.sequence:
            return []
        idle = not report.running and not report.waiting
        if last is None or idle or report.step > last.step or not (last.running or last.waiting):
            self.progressed_at = now
        self.report = report
        self.reported_at = now
        self.chains.update(report.sessions, now, full=report.full)
        ended = self.ledger.reconcile(report)
        self.refresh()
        return ended

    def state(self, now: float, standing: Standing) -> GroupState:
        """A frozen picture."""
        report = self.report
        return GroupState(
            card=self.card,
            epoch=self.epoch,
            standing=standing,
            committed=self.ledger.committed,
            grants=len(self.ledger.open),
            running=report.running if report else 0,
            waiting=report.waiting if report else 0,
            load=self.load,
            reported_s=now - self.reported_at,
            progressed_s=now - self.progressed_at,
            sessions=len(self.chains),
            pool=report.pool if report else None,
        )


class View:
    """All groups and grants. A request's latest attempt is remembered for `forget_s` after its grant has ended, so that
    a late copy of an ask is not granted again."""

    def __init__(self, forget_s: float, first_epoch: int) -> None:
        self.groups: dict[str, GroupView] = {}
        self.serving: dict[str, dict[str, GroupView]] = {}
        self.epochs: dict[str, int] = {}
        self.holders: dict[str, GroupView] = {}
        self.latest: dict[str, tuple[int, str]] = {}
        self._forget_s = forget_s
        self._first_epoch = first_epoch
        self._expiries: list[tuple[float, str]] = []
        self._ended: deque[tuple[float, str, str]] = deque()

    def join(self, card: GroupCard, now: float) -> GroupView:
        """A new incarnation of a group, one epoch above any that was heard of; the one before ends."""
        self.drop(card.group, now)
        group = GroupView(card, self.epochs.get(card.group, self._first_epoch) + 1, now)
        self.epochs[card.group] = group.epoch
        self.groups[card.group] = group
        for model in card.models:
            self.serving.setdefault(model, {})[card.group] = group
        return group

    def hear_of(self, group: str, epoch: int) -> None:
        """Some incarnation of a group exists, or existed."""
        self.epochs[group] = max(epoch, self.epochs.get(group, self._first_epoch))

    def drop(self, name: str, now: float) -> None:
        """The group is gone, and its grants with it."""
        group = self.groups.pop(name, None)
        if group is None:
            return
        for model in group.card.models:
            del self.serving[model][name]
        for grant in tuple(group.ledger.open):
            self.close(grant, now)

    def open(self, group: GroupView, entry: OpenGrant) -> None:
        """A grant has been given."""
        group.ledger.add(entry)
        group.refresh()
        grant = entry.grant
        self.holders[grant.id] = group
        self.latest[grant.request] = (grant.attempt, grant.id)
        heapq.heappush(self._expiries, (entry.expires_at, grant.id))

    def close(self, grant: str, now: float) -> OpenGrant | None:
        """A grant has ended; None when it had before."""
        group = self.holders.get(grant)
        entry = group.ledger.close(grant) if group else None
        if group is None or entry is None:
            return None
        group.refresh()
        self.forget_later(entry, now)
        return entry

    def forget_later(self, entry: OpenGrant, now: float) -> None:
        """The ledger has closed this entry."""
        self.holders.pop(entry.grant.id, None)
        self._ended.append((now + self._forget_s, entry.grant.request, entry.grant.id))

    def void(self, grant: str, *, withdrawn: bool) -> None:
        """A grant must not be used any more."""
        group = self.holders.get(grant)
        if group:
            group.ledger.cancel(grant, withdrawn=withdrawn)

    def entry(self, grant: str) -> OpenGrant | None:
        """The grant while it is open."""
        group = self.holders.get(grant)
        return group.ledger.open.get(grant) if group else None

    def advance(self, now: float) -> None:
        """Void the grants whose time is up and that nobody took; forget what ended long ago."""
        while self._expiries and self._expiries[0][0] <= now:
            _, grant = heapq.heappop(self._expiries)
            entry = self.entry(grant)
            if entry is not None and entry.stage is Stage.ISSUED:
                self.void(grant, withdrawn=False)
        while self._ended and self._ended[0][0] <= now:
            _, request, grant = self._ended.popleft()
            if self.latest.get(request, (0, ""))[1] == grant:
                del self.latest[request]
