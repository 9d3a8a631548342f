"""The coordinator: which groups there are, and who may run what where. Joins view, dispatch, ladder and news.

Every call answers at once and is idempotent, so that a caller whose answer was lost asks again. Knows no network and
no clock; its only randomness is drawn from the seed it is given.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from cluster.coordination.cards import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    GroupCard,
    GroupState,
    Reply,
    SessionCopy,
    get_along,
)
from cluster.coordination.control import Command, Control
from cluster.coordination.dispatch import Dispatch
from cluster.coordination.grants import REFUSED_STALE, Ask, Grant, LineNews, Outcome, Refusal, Ticket
from cluster.coordination.groupview import GroupView
from cluster.coordination.ladder import Signals
from cluster.coordination.ledger import OpenGrant, Stage
from cluster.coordination.maintenance import Maintenance
from cluster.coordination.news import Answer, Newsroom
from cluster.coordination.revisions import Edition, Revision, Revisions
from cluster.coordination.status import status_of
from cluster.coordination.terms import CoordinatorTerms
from cluster.coordination.view import View
from cluster.settings import LiveSettings
from workers.plan import Finish, GroupReport


class Coordinator:
    """Epochs begin above `first_epoch`, which also identifies this life: whoever may restart a coordinator passes a
    number that grows (seconds of wall time), so that neither an epoch nor a grant's id comes twice even if a group
    joins that nobody has reported yet. `seed` spreads what clients are told to wait. `revisions` are its settings, and
    `cordoned` its groups that get nothing new, where an earlier life has left some; `terms` hold what these do not
    say."""

    def __init__(
        self,
        terms: CoordinatorTerms | None = None,
        *,
        first_epoch: int = 0,
        seed: int = 0,
        revisions: Revisions | None = None,
        cordoned: Iterable[str] = (),
    ) -> None:
        terms = terms or CoordinatorTerms()
        revisions = revisions or Revisions.begin(Edition("", LiveSettings(terms.line, terms.ladder)))
        self._view = View(terms, first_epoch)
        self._news = Newsroom(first_epoch, terms.line.ingress_s)
        self._dispatch = Dispatch(self._view, self._news, terms, random.Random(seed))
        self._control = Control(self._view, self._dispatch, terms, revisions, Maintenance(cordoned))

    # -- groups -------------------------------------------------------------------------------------------------------

    def join(self, card: GroupCard, now: float) -> int:
        """A group that can take work joins, or joins again; returns its epoch. ValueError for a card that makes no
        sense here."""
        if not get_along(card.protocol):
            known = f"{OLDEST_PROTOCOL} to {PROTOCOL}"
            raise ValueError(f"group {card.group} speaks protocol {card.protocol}, the coordinator {known}")
        if not card.models:
            raise ValueError(f"group {card.group} serves no model")
        if min(card.blocks, card.block_size, card.max_num_seqs, card.max_num_batched_tokens, card.max_model_len) < 1:
            raise ValueError(f"group {card.group} has no room: {card}")
        self._advance(now)
        is_known = card.group in self._view.groups
        group = self._view.join(card, now)
        if is_known:
            self._dispatch.give_up_lost(now)
        self._control.admit(group, now)
        self._dispatch.offer(group)
        self._dispatch.serve(now)
        return group.epoch

    def leave(self, group: str, epoch: int, now: float, *, replaced: bool = False) -> None:
        """This incarnation takes nothing new: it drains, or it is dead. What it has accepted runs on while it reports;
        without reports it is dropped. `replaced`: it goes on purpose, and another group may be on its way; requests
        wait for that."""
        self._advance(now)
        known = self._view.groups.get(group)
        if known is not None and known.epoch == epoch:
            self._view.leave(known, now, returns=replaced)
            if replaced:
                self._control.maintenance.forget(group)

    def report(self, report: GroupReport, now: float) -> Reply:
        """A group's news; the reply names its void grants until `report.voided` acknowledges them, and its limits."""
        self._advance(now)
        self._view.hear_of(report.group, report.epoch)
        group = self._view.groups.get(report.group)
        if group is None or group.epoch != report.epoch:
            # A lower epoch than the one known is an incarnation that was replaced; anything else joins again.
            return Reply(False, group.epoch if group and group.epoch > report.epoch else 0)
        ended = group.take(report, now)
        if ended is not None:
            for entry in ended:
                self._view.forget_later(entry, now)
                self._drained(entry, now)
            self._climb(group, report, now)
            if group.listed:
                self._view.touch(group, now)
            else:
                self._view.watch(group, now)
            self._dispatch.offer(group)
            self._dispatch.serve(now)
        orders = self._control.orders(group, report, now)
        return Reply(True, group.epoch, tuple(group.ledger.void), group.limits, self._view.beat_s, orders)

    # -- the operator -------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> tuple[Revisions, frozenset[str]]:
        """What must outlive this coordinator: `revisions` and `cordoned` of the next one."""
        return self._control.revisions, frozenset(self._control.maintenance.cordoned)

    def carry_out(self, command: Command, now: float) -> Revision:
        """What an operator asks for; the settings that are in force then. RevisionError, UnknownGroup."""
        self._advance(now)
        revision = self._control.carry_out(command, now)
        self._dispatch.serve(now)
        return revision

    def revision(self, ingress: str, held: int, fault: str, now: float) -> Revision:
        """The settings in force, for an ingress that goes by revision `held`."""
        return self._control.hear(ingress, held, fault, now)

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, ingress: str, asks: Iterable[Ask], now: float) -> tuple[Grant | Ticket | Refusal, ...]:
        """One answer per ask, in order. An attempt that holds a grant or a place gets the same one again; a newer
        attempt makes the older one's grant void and takes its place away."""
        self._advance(now)
        answers = tuple(self._place(ingress, ask, now) for ask in asks)
        self._dispatch.serve(now)
        return answers

    def news(self, ingress: str, acked: int, now: float) -> LineNews:
        """What became of the ingress's tickets and it has not acknowledged; does not wait."""
        self._advance(now)
        outbox = self._news.read(ingress, acked, now)
        answers = tuple(self._as_it_stands(answer, now) for _, answer in outbox.answers)
        return LineNews(outbox.number, outbox.life, answers)

    def wakes(self) -> tuple[str, ...]:
        """The ingresses for which there are news since the last call."""
        return self._news.wakes()

    def leave_line(self, keys: Iterable[tuple[str, int]], now: float) -> None:
        """These (request, attempt) wait no more; a grant that they have got and nobody has taken yet is void."""
        self._advance(now)
        for request, attempt in keys:
            waiter = self._dispatch.waiting.get(request)
            if waiter is not None and waiter.ask.attempt <= attempt:
                self._dispatch.drop(waiter, now)
            known, grant = self._view.latest.get(request, (-1, ""))
            entry = self._view.entry(grant)
            if known <= attempt and entry is not None and entry.stage is Stage.ISSUED:
                self._view.void(grant, withdrawn=True)
            self._view.end(request, attempt, now)
        self._dispatch.serve(now)

    def settle(self, outcomes: Iterable[Outcome], now: float) -> None:
        """These ended. What finished by itself has freed its blocks; an aborted one does when the group says so."""
        self._advance(now)
        for outcome in outcomes:
            group = self._view.holders.get(outcome.grant)
            if group is None:
                continue
            if outcome.finish in (Finish.ABORT, Finish.ERROR):
                open_grant = self._view.entry(outcome.grant)
                if outcome.satisfied and open_grant is not None and open_grant.stage is not Stage.VOID:
                    self._learn(open_grant.ask, outcome.output_tokens)
                self._view.void(outcome.grant, withdrawn=True)
                continue
            entry = self._view.close(outcome.grant, now)
            if entry is not None:
                self._learn(entry.ask, outcome.output_tokens)
                self._drained(entry, now)
                self._dispatch.offer(group)
        self._dispatch.serve(now)

    def withdraw(self, grants: Iterable[str], now: float) -> None:
        """These will not be used: void until their groups have acknowledged."""
        self._advance(now)
        for grant in grants:
            self._view.void(grant, withdrawn=True)

    def tick(self, now: float) -> None:
        """What only time brings: ingresses that do not listen any more, groups to keep free, room that came unseen. To
        be called a few times a second."""
        self._advance(now)
        for waiter in self._news.lapse(now):
            self._dispatch.drop(waiter, now)
        self._dispatch.sweep(now)

    # -- looking at it ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that stand in a line."""
        return len(self._dispatch.waiting)

    def groups(self, now: float) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        self._advance(now)
        return tuple(group.state(now, self._view.standing(group, now)) for group in self._view.groups.values())

    def session(self, namespaces: Iterable[bytes], now: float) -> tuple[SessionCopy, ...]:
        """What groups have reported to have cached under `namespaces`."""
        self._advance(now)
        copies = []
        for namespace in namespaces:
            for name, group in self._view.groups.items():
                blocks, seconds = group.chains.cached(namespace, now)
                if blocks:
                    copies.append(SessionCopy(name, blocks, group.card.extent.cached_tokens(blocks), seconds))
        return tuple(copies)

    def status(self, now: float) -> dict[str, object]:
        """Everything for people and programs, as plain JSON values."""
        self._advance(now)
        return status_of(self._view, self._dispatch, len(self._news), now) | self._control.status(now)

    def check(self) -> None:
        """Recount everything from scratch; AssertionError where something does not add up."""
        self._dispatch.check()
        for group in self._view.groups.values():
            group.ledger.check()

    # -- one ask ------------------------------------------------------------------------------------------------------

    def _place(self, ingress: str, ask: Ask, now: float) -> Grant | Ticket | Refusal:
        waiter = self._dispatch.waiting.get(ask.request)
        if waiter is not None:
            if ask.attempt == waiter.ask.attempt:
                return self._dispatch.ticket(waiter, now)
            if ask.attempt < waiter.ask.attempt:
                return self._dispatch.refuse(_stale(ask))
            self._dispatch.drop(waiter, now)
        latest = self._view.latest.get(ask.request)
        if latest is not None:
            attempt, grant = latest
            entry = self._view.entry(grant)
            if ask.attempt == attempt and entry is not None and entry.stage is not Stage.VOID:
                return _again(entry, now)
            if ask.attempt <= attempt:
                return self._dispatch.refuse(_stale(ask))
            self._view.void(grant, withdrawn=True)
        return self._dispatch.place(ingress, ask, now)

    def _as_it_stands(self, answer: Answer, now: float) -> Answer:
        """An answer that is told late, or again: a grant may have less time left, or have turned void."""
        if isinstance(answer, Refusal):
            return answer
        entry = self._view.entry(answer.id)
        if entry is not None and entry.stage is not Stage.VOID:
            return _again(entry, now)
        return Refusal(answer.request, answer.attempt, REFUSED_STALE, "The grant has ended before it was taken.")

    def _learn(self, ask: Ask, output_tokens: int) -> None:
        if not ask.replay:
            experience = self._dispatch.model(ask.model).experience
            experience.learn(ask.share.tenant, output_tokens, ask.max_tokens)

    def _drained(self, entry: OpenGrant, now: float) -> None:
        # In the line's tokens, because those who wait are told by them: blocks of a token differ with layer groups.
        self._dispatch.model(entry.ask.model).drain.add(entry.cost, now)

    def _climb(self, group: GroupView, report: GroupReport, now: float) -> None:
        total = max(1, report.pool.total)
        full = any(self._dispatch.is_full(model) for model in group.card.models)
        # What batch work was overbooked with is solved by preempting it, not by shrinking.
        growth = (report.committed - group.ledger.overbooked) / total
        group.ladder.update(Signals(report.pool.held / total, growth, full), now)

    def _advance(self, now: float) -> None:
        if self._view.advance(now):
            self._dispatch.give_up_lost(now)
        self._dispatch.expire(now)


def _again(entry: OpenGrant, now: float) -> Grant:
    """The grant as it stands now, for an ask that came twice."""
    old = entry.grant
    left = min(old.expires_s, max(0.0, entry.expires_at - now))
    return Grant(old.id, old.request, old.attempt, old.group, old.epoch, old.address, old.blocks, left)


def _stale(ask: Ask) -> Refusal:
    message = f"Attempt {ask.attempt} of this request has ended or was replaced; ask with a new attempt."
    return Refusal(ask.request, ask.attempt, REFUSED_STALE, message)
