"""What the coordinator believes: which groups there are and which of them may get work, who holds which grant.

The groups are the truth, this is a view of them. Decides nothing about a request and knows no clock.
"""

from __future__ import annotations

from collections import Counter, deque

from cluster.coordination.cards import GroupCard, Standing
from cluster.coordination.groupview import GroupView
from cluster.coordination.ledger import OpenGrant, Stage
from cluster.coordination.roster import Roster
from cluster.coordination.terms import CoordinatorTerms
from cluster.coordination.timers import Timers
from workers.plan import GroupReport

REPORTS_PER_S = 200.0
"""How often all groups together report: with more of them each reports less often."""
BEAT_S = 0.5
LONGEST_BEAT_S = 5.0
AWAIT_S = 900.0
"""How long requests may wait for the successor of a model's last group: a big one takes minutes to load."""
_BEATS = 3.0
"""So many reports may be missing before a group counts as silent."""


class View:
    """All groups and grants. A request's latest attempt is remembered for `forget_s` after its grant has ended, so that
    a late copy of an ask is not granted again."""

    def __init__(self, terms: CoordinatorTerms, first_epoch: int) -> None:
        self.groups: dict[str, GroupView] = {}
        self.serving: dict[str, dict[str, GroupView]] = {}
        self.epochs: dict[str, int] = {}
        self.holders: dict[str, GroupView] = {}
        self.latest: dict[str, tuple[int, str]] = {}
        self.roster = Roster()
        self.retired: Counter[str] = Counter()
        self._terms = terms
        self._bounds = terms.bounds
        self._first_epoch = first_epoch
        self._joined = 0
        self._expiries: Timers[str] = Timers()
        self._watch: Timers[GroupView] = Timers()
        self._ended: deque[tuple[float, str, str]] = deque()
        self._awaited: dict[str, float] = {}
        self._canonical: Counter[tuple[str, str]] = Counter()
        self._largest: dict[str, GroupView | None] = {}

    @property
    def beat_s(self) -> float:
        """Seconds from one report of a group to its next."""
        return min(LONGEST_BEAT_S, max(BEAT_S, len(self.groups) / REPORTS_PER_S))

    @property
    def lapse_s(self) -> float:
        """How long a group may be silent."""
        return max(self._bounds.lapse_s, _BEATS * self.beat_s)

    # -- groups -------------------------------------------------------------------------------------------------------

    def join(self, card: GroupCard, now: float) -> GroupView:
        """A new incarnation of a group, one epoch above any that was heard of; the one before ends."""
        self.drop(card.group, now)
        epoch = self.epochs.get(card.group, self._first_epoch) + 1
        self._joined += 1
        group = GroupView(card, epoch, self._joined, now, self._terms)
        self.epochs[card.group] = epoch
        self.groups[card.group] = group
        for model in card.models:
            self.serving.setdefault(model, {})[card.group] = group
            self._canonical[card.models[0], model] += 1
            self._largest.pop(model, None)
        self.watch(group, now)
        return group

    def hear_of(self, group: str, epoch: int) -> None:
        """Some incarnation of a group exists, or existed."""
        self.epochs[group] = max(epoch, self.epochs.get(group, self._first_epoch))

    def drop(self, name: str, now: float) -> None:
        """The group is gone, and its grants with it."""
        group = self.groups.pop(name, None)
        if group is None:
            return
        self.roster.remove(group)
        for model in group.card.models:
            del self.serving[model][name]
            self._canonical[group.card.models[0], model] -= 1
            self._largest.pop(model, None)
        for grant in tuple(group.ledger.open):
            self.close(grant, now)
        if group.report is not None:
            self.retired.update(counters(group.report))

    def leave(self, group: GroupView, now: float, *, returns: bool = False) -> None:
        """It takes nothing new any more. `returns`: a successor is on its way, for which requests may wait."""
        group.leaving, group.returns = True, returns
        self.roster.remove(group)
        for model in group.card.models if returns else ():
            self._awaited[model] = now + AWAIT_S

    def is_awaited(self, model: str, now: float) -> bool:
        """Whether a group of `model` will take work though none does now: one that is cordoned, or the successor of one
        that has left."""
        if now < self._awaited.get(model, now):
            return True
        return any(group.awaited for group in self.serving.get(model, {}).values())

    def rule(self, terms: CoordinatorTerms) -> None:
        """These hold from now on."""
        self._terms = terms

    def standing(self, group: GroupView, now: float) -> Standing:
        return group.standing(now, self.lapse_s, self._bounds.stall_s)

    def watch(self, group: GroupView, now: float) -> None:
        """Put the group into the roster, or take it out, as it stands; look again when that may change by itself."""
        up = self.standing(group, now) is Standing.UP
        if up:
            group.refresh(now)
            self.roster.put(group)
            at = min(group.reported_at + self.lapse_s, group.progressed_at + self._bounds.stall_s)
        else:
            self.roster.remove(group)
            at = group.reported_at + self._silence_s
        group.watch_at = max(at, now + 0.001)
        self._watch.add(group.watch_at, group)

    def touch(self, group: GroupView, now: float) -> None:
        """Something about its load has changed."""
        group.refresh(now)
        if group.listed:
            self.roster.put(group)

    def resolve(self, model: str) -> str:
        """The first name of the model, where exactly the same groups serve it under that."""
        groups = self.serving.get(model)
        if not groups:
            return model
        first = next(iter(groups.values())).card.models[0]
        same = self._canonical[first, model] == len(groups) == len(self.serving[first])
        return first if same else model

    def largest(self, model: str) -> GroupView | None:
        """The group that holds the longest sequence, whatever its standing."""
        if model not in self._largest:
            groups = self.serving.get(model, {}).values()
            self._largest[model] = max(groups, key=lambda group: group.longest, default=None)
        return self._largest[model]

    # -- grants -------------------------------------------------------------------------------------------------------

    def open(self, group: GroupView, entry: OpenGrant, now: float) -> None:
        """A grant has been given."""
        group.open(entry, now)
        self.touch(group, now)
        grant = entry.grant
        self.holders[grant.id] = group
        self.latest[grant.request] = (grant.attempt, grant.id)
        self._expiries.add(entry.expires_at, grant.id)

    def close(self, grant: str, now: float) -> OpenGrant | None:
        """A grant has ended; None when it had before."""
        group = self.holders.get(grant)
        entry = group.ledger.close(grant) if group else None
        if group is None or entry is None:
            return None
        group.ended(entry)
        self.touch(group, now)
        self.forget_later(entry, now)
        return entry

    def forget_later(self, entry: OpenGrant, now: float) -> None:
        """The ledger has closed this entry."""
        self.holders.pop(entry.grant.id, None)
        self._ended.append((now + self._bounds.forget_s, entry.grant.request, entry.grant.id))

    def end(self, request: str, attempt: int, now: float) -> None:
        """An attempt without a grant is over: it may not come back."""
        if attempt > self.latest.get(request, (-1, ""))[0]:
            self.latest[request] = (attempt, "")
            self._ended.append((now + self._bounds.forget_s, request, ""))

    def void(self, grant: str, *, withdrawn: bool) -> None:
        """A grant must not be used any more."""
        group = self.holders.get(grant)
        if group:
            group.ledger.cancel(grant, withdrawn=withdrawn)

    def entry(self, grant: str) -> OpenGrant | None:
        """The grant while it is open."""
        group = self.holders.get(grant)
        return group.ledger.open.get(grant) if group else None

    # -- time ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Void the grants whose time is up and that nobody took; forget what ended long ago; take groups that are
        silent or stuck out of the roster, and drop those that are silent for long. True when one was dropped."""
        for _, grant in self._expiries.due(now):
            entry = self.entry(grant)
            if entry is not None and entry.stage is Stage.ISSUED:
                self.void(grant, withdrawn=False)
        while self._ended and self._ended[0][0] <= now:
            _, request, grant = self._ended.popleft()
            if request in self.latest and self.latest[request][1] == grant:
                del self.latest[request]
        return self._look(now)

    def _look(self, now: float) -> bool:
        dropped = False
        for at, group in self._watch.due(now):
            name = group.card.group
            if self.groups.get(name) is not group or at != group.watch_at:
                continue
            if now - group.reported_at > self._silence_s:
                self.drop(name, now)
                dropped = True
            else:
                self.watch(group, now)
        return dropped

    @property
    def _silence_s(self) -> float:
        return max(self._bounds.drop_s, self.lapse_s)


_COUNTED = (
    "preemptions",
    "finished",
    "output_tokens",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "leaked",
    "ooms",
    "evicted",
    "expired",
    "expired_asked",
    "lost_to_scope",
)


def counters(report: GroupReport) -> dict[str, int]:
    """What the group has counted since its start."""
    return {name: getattr(report, name) for name in _COUNTED}
