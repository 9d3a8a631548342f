"""The coordinator: which groups there are, and which of them may run what. Joins view and placement.

`place` answers at once and never waits. Every call is idempotent, so that a caller whose answer was lost asks again.
Knows no network and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cluster.coordination.cards import PROTOCOL, GroupCard, GroupState, Reply, Standing
from cluster.coordination.experience import Experience
from cluster.coordination.grants import REFUSED_STALE, Ask, Grant, Outcome, Refusal
from cluster.coordination.ledger import OpenGrant, Stage
from cluster.coordination.placement import Bounds, Full, blocks_for, place, refuse_full
from cluster.coordination.view import GroupView, View
from workers.plan import Finish, GroupReport

SWEEP_S = 1.0
"""How often silent groups are looked for."""


class Coordinator:
    """A grant that no group has taken within `grant_s` is void; a group that is silent for `drop_s` is forgotten with
    its grants, and joins again when it is back. `bounds`: when a group gets nothing new. Epochs begin above
    `first_epoch`: whoever may restart a coordinator passes a number that grows (seconds of wall time), so that neither
    an epoch nor a grant's id comes twice even if a group joins that nobody has reported yet."""

    def __init__(
        self,
        *,
        bounds: Bounds | None = None,
        grant_s: float = 5.0,
        drop_s: float = 30.0,
        forget_s: float = 60.0,
        first_epoch: int = 0,
    ) -> None:
        self._bounds = bounds or Bounds()
        self._grant_s = grant_s
        self._drop_s = drop_s
        self._view = View(forget_s, first_epoch)
        self._experience: dict[str, Experience] = {}
        self._granted = 0
        self._refused: Counter[str] = Counter()
        self._swept_at = float("-inf")

    # -- groups -------------------------------------------------------------------------------------------------------

    def join(self, card: GroupCard, now: float) -> int:
        """A group that can take work joins, or joins again; returns its epoch. ValueError for a card that makes no
        sense here."""
        if card.protocol != PROTOCOL:
            raise ValueError(f"group {card.group} speaks protocol {card.protocol}, the coordinator {PROTOCOL}")
        if min(card.blocks, card.block_size, card.max_num_seqs, card.max_num_batched_tokens, card.max_model_len) < 1:
            raise ValueError(f"group {card.group} has no room: {card}")
        for model in card.models:
            self._experience.setdefault(model, Experience())
        return self._view.join(card, now).epoch

    def leave(self, group: str, epoch: int, now: float) -> None:
        """This incarnation takes nothing new: it drains, or it is dead. What it has accepted runs on while it reports;
        without reports it is dropped."""
        known = self._view.groups.get(group)
        if known is not None and known.epoch == epoch:
            known.leaving = True
        self._sweep(now)

    def report(self, report: GroupReport, now: float) -> Reply:
        """A group's news; the reply names its void grants until `report.voided` acknowledges them."""
        self._advance(now)
        self._view.hear_of(report.group, report.epoch)
        group = self._view.groups.get(report.group)
        if group is None or group.epoch != report.epoch:
            # A lower epoch than the one known is an incarnation that was replaced; anything else joins again.
            return Reply(False, group.epoch if group and group.epoch > report.epoch else 0)
        for entry in group.take(report, now):
            self._view.forget_later(entry, now)
            self._drained(group, entry, now)
        return Reply(True, group.epoch, tuple(group.ledger.void))

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, asks: Iterable[Ask], now: float) -> tuple[Grant | Refusal, ...]:
        """One answer per ask, in order. An attempt that holds a grant gets the same one again; a newer attempt makes
        the older one's grant void."""
        self._advance(now)
        return tuple(self._place(ask, now) for ask in asks)

    def settle(self, outcomes: Iterable[Outcome], now: float) -> None:
        """These ended. What finished by itself has freed its blocks; an aborted one does when the group says so."""
        self._advance(now)
        for outcome in outcomes:
            group = self._view.holders.get(outcome.grant)
            if group is None:
                continue
            if outcome.finish in (Finish.ABORT, Finish.ERROR):
                self._view.void(outcome.grant, withdrawn=True)
                continue
            entry = self._view.close(outcome.grant, now)
            if entry is not None:
                self._experience[entry.ask.model].learn(outcome.output_tokens, entry.ask.max_tokens)
                self._drained(group, entry, now)

    def withdraw(self, grants: Iterable[str], now: float) -> None:
        """These will not be used: void until their groups have acknowledged."""
        self._advance(now)
        for grant in grants:
            self._view.void(grant, withdrawn=True)

    # -- looking at it ------------------------------------------------------------------------------------------------

    def groups(self, now: float) -> tuple[GroupState, ...]:
        """All groups, whatever their standing."""
        self._sweep(now)
        return tuple(group.state(now, self._standing(group, now)) for group in self._view.groups.values())

    def status(self, now: float) -> dict[str, object]:
        """Everything for people and programs, as plain JSON values."""
        states = self.groups(now)
        stages = Counter(e.stage.value for g in self._view.groups.values() for e in g.ledger.open.values())
        return {
            "protocol": PROTOCOL,
            "groups": [_plain(state) for state in states],
            "models": {model: self._model_status(model, now) for model in self._view.serving},
            "grants": {stage.value: stages[stage.value] for stage in Stage} | {"given": self._granted},
            "refused": dict(self._refused),
        }

    def _model_status(self, model: str, now: float) -> dict[str, object]:
        groups = self._view.serving[model].values()
        return {
            "groups": len(groups),
            "up": sum(self._standing(group, now) is Standing.UP for group in groups),
            "expected_output_share": round(self._experience[model].share, 4),
            "drained_tokens_per_s": round(self._experience[model].rate(now), 1),
        }

    # -- one ask ------------------------------------------------------------------------------------------------------

    def _place(self, ask: Ask, now: float) -> Grant | Refusal:
        latest = self._view.latest.get(ask.request)
        if latest is not None:
            attempt, grant = latest
            entry = self._view.entry(grant)
            if ask.attempt == attempt and entry is not None and entry.stage is not Stage.VOID:
                return _again(entry, now)
            if ask.attempt <= attempt:
                return self._refuse(_stale(ask))
            self._view.void(grant, withdrawn=True)
        experience = self._experience.get(ask.model) or Experience()
        output = experience.expect(ask.max_tokens)
        found = place(self._view.serving.get(ask.model, {}).values(), ask, output, self._bounds, now)
        if isinstance(found, Full):
            return self._refuse(refuse_full(ask, experience.wait_for(found.tokens, now)))
        if isinstance(found, Refusal):
            return self._refuse(found)
        return self._grant(found, ask, blocks_for(found, ask, output), now)

    def _grant(self, group: GroupView, ask: Ask, blocks: int, now: float) -> Grant:
        self._granted += 1
        card = group.card
        name = f"{card.group}/{group.epoch}/{self._granted}"
        grant = Grant(name, ask.request, ask.attempt, card.group, group.epoch, card.address, blocks, self._grant_s)
        self._view.open(group, OpenGrant(grant, ask, now + self._grant_s))
        return grant

    def _refuse(self, refusal: Refusal) -> Refusal:
        self._refused[refusal.code] += 1
        return refusal

    def _drained(self, group: GroupView, entry: OpenGrant, now: float) -> None:
        self._experience[entry.ask.model].drain(entry.grant.blocks * group.card.block_size, now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        self._view.advance(now)
        if now - self._swept_at >= SWEEP_S:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        silent = [name for name, group in self._view.groups.items() if now - group.reported_at > self._drop_s]
        for name in silent:
            self._view.drop(name, now)

    def _standing(self, group: GroupView, now: float) -> Standing:
        return group.standing(now, self._bounds.lapse_s, self._bounds.stall_s)


def _again(entry: OpenGrant, now: float) -> Grant:
    """The grant as it stands now, for an ask that came twice."""
    old = entry.grant
    left = max(0.0, entry.expires_at - now)
    return Grant(old.id, old.request, old.attempt, old.group, old.epoch, old.address, old.blocks, left)


def _stale(ask: Ask) -> Refusal:
    message = f"Attempt {ask.attempt} of this request has ended or was replaced; ask with a new attempt."
    return Refusal(ask.request, ask.attempt, REFUSED_STALE, message)


def _plain(state: GroupState) -> dict[str, object]:
    card, pool = state.card, state.pool
    return {
        "group": card.group,
        "epoch": state.epoch,
        "state": state.standing.value,
        "models": list(card.models),
        "revision": card.revision,
        "load": round(state.load, 4),
        "committed": state.committed,
        "grants": state.grants,
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
        "ranks": [{name: getattr(rank, name) for name in rank.__slots__} for rank in card.ranks],
    }
