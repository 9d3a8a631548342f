"""What an operator may ask of a coordinator: other settings, and something of single groups; and who has taken it in.

Joins the revisions, the groups' maintenance and the view. Pure: settings reach groups with the replies to their
reports, ingresses with what they ask for all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cluster.coordination.dispatch import Dispatch
from cluster.coordination.groupview import GroupView
from cluster.coordination.maintenance import Maintenance
from cluster.coordination.revisions import Edition, Revision, Revisions
from cluster.coordination.terms import CoordinatorTerms
from cluster.coordination.view import View
from kvstore.message import message
from workers.orders import Orders
from workers.plan import GroupReport

SILENT_S = 30.0
"""An ingress that has not asked for so long is gone."""


class UnknownGroup(ValueError):
    """There is no group of that name; the message lists those that there are."""


@message
@dataclass(frozen=True, slots=True)
class Revise:
    """Put `edition` in force in place of revision `base` (None: of whichever). `undo`: it is the one before, again."""

    edition: Edition
    base: int | None = None
    undo: bool = False


@message
@dataclass(frozen=True, slots=True)
class Rollback:
    """Put the edition before this one in force again, in place of revision `base`."""

    base: int | None = None


@message
@dataclass(frozen=True, slots=True)
class Purge:
    """Every group forgets and zeroes what it has cached."""


@message
@dataclass(frozen=True, slots=True)
class Cordon:
    """Nothing new goes to `group`; `on` False: it takes work again, and is not emptied any more."""

    group: str
    on: bool = True


@message
@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing new goes to `group`; what runs there gets `within_s` to end and is handed over then. `restart`: after
    that its ranks are built anew, and it takes work again."""

    group: str
    within_s: float
    restart: bool = False


Command = Revise | Rollback | Purge | Cordon | Empty


class Control:
    """Changes `view` and `dispatch` as it is told; `terms` hold what no live setting says."""

    def __init__(
        self, view: View, dispatch: Dispatch, terms: CoordinatorTerms, revisions: Revisions, maintenance: Maintenance
    ) -> None:
        self.revisions = revisions
        self.maintenance = maintenance
        self._view = view
        self._dispatch = dispatch
        self._terms = terms
        self._ingresses: dict[str, tuple[int, str, float]] = {}
        self._rule()

    def carry_out(self, command: Command, now: float) -> Revision:
        """Do it; the revision that is in force then. RevisionError, UnknownGroup."""
        match command:
            case Revise(edition, base, undo):
                self.revisions.check(base)
                if undo:
                    self.revisions.rollback(edition)
                else:
                    self.revisions.revise(edition)
                self._rule()
            case Rollback(base):
                self.revisions.check(base)
                self.revisions.rollback()
                self._rule()
            case Purge():
                self.revisions.purge()
            case Cordon(name, on):
                group = self._group(name)
                if on:
                    self.maintenance.cordon(name)
                else:
                    self.maintenance.uncordon(name)
                self._open_or_close(group, now)
            case Empty(name, within_s, restart):
                group = self._group(name)
                self.maintenance.empty(name, group.epoch, now + within_s, restart=restart)
                self._open_or_close(group, now)
        return self.revisions.current

    def admit(self, group: GroupView, now: float) -> None:
        """An incarnation has joined: what is in force holds for it too."""
        self._restrict(group)
        self.maintenance.joined(group.card.group, group.epoch)
        self._open_or_close(group, now)

    def orders(self, group: GroupView, report: GroupReport, now: float) -> Orders | None:
        """What to tell a group with the reply to its report; None where it knows everything."""
        hand_over, rebuild = self.maintenance.orders(group.card.group, idle=group.idle, now=now)
        number = self.revisions.current.number
        if report.revision == number and not hand_over and not rebuild:
            return None
        terms = self.revisions.current.edition.live.terms_of(group.card.models[0])
        return Orders(number, terms, hand_over, rebuild)

    def hear(self, ingress: str, held: int, fault: str, now: float) -> Revision:
        """An ingress goes by revision `held`, or would if it were not for `fault` ("": somebody who
        only looks); what is in force."""
        if ingress:
            self._ingresses[ingress] = (held, fault, now)
        return self.revisions.current

    def status(self, now: float) -> dict[str, Any]:
        """Keys: revision, ingress_settings, maintenance (by group, where there is something to say)."""
        self._ingresses = {name: row for name, row in self._ingresses.items() if now - row[2] < SILENT_S}
        current = self.revisions.current
        words = {
            name: self.maintenance.word(name, idle=group.idle, now=now) for name, group in self._view.groups.items()
        }
        return {
            "revision": {
                "number": current.number,
                "digest": current.edition.digest,
                "undone": current.undone,
                "earlier": len(self.revisions.past),
            },
            "ingress_settings": [
                {"ingress": name, "revision": held, "fault": fault}
                for name, (held, fault, _) in sorted(self._ingresses.items())
            ],
            "maintenance": {name: word for name, word in words.items() if word},
        }

    def _group(self, name: str) -> GroupView:
        group = self._view.groups.get(name)
        if group is None:
            known = ", ".join(sorted(self._view.groups)) or "none is up"
            raise UnknownGroup(f"there is no group called {name!r}; groups: {known}")
        return group

    def _open_or_close(self, group: GroupView, now: float) -> None:
        group.cordoned = group.card.group in self.maintenance.cordoned
        self._view.watch(group, now)
        if group.listed:
            self._dispatch.offer(group)

    def _rule(self) -> None:
        """The settings in force hold from now on."""
        live = self.revisions.current.edition.live
        line = replace(live.line, ingress_s=self._terms.line.ingress_s)
        terms = replace(self._terms, line=line, ladder=live.ladder)
        self._view.rule(terms)
        self._dispatch.rule(terms)
        for group in self._view.groups.values():
            self._restrict(group)
            if group.listed:
                self._dispatch.offer(group)

    def _restrict(self, group: GroupView) -> None:
        live = self.revisions.current.edition.live
        group.restrict(live.terms_of(group.card.models[0]), live.ladder)
