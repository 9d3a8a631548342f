"""Who is granted what, and when: from an ask to a grant or a place in line, from room in a group to whoever is next.

Work per call is bounded: room is offered to the first few of a line, and what is left over is looked at with the next
tick. Knows no network and no clock.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from cluster.coordination.admission import blocks_for, can_hold, has_room, is_open, overbooked
from cluster.coordination.drain import Drain
from cluster.coordination.experience import Experience
from cluster.coordination.grants import REFUSED_FULL, REFUSED_LATE, Ask, Grant, Refusal, Ticket
from cluster.coordination.groupview import GroupView
from cluster.coordination.ledger import OpenGrant
from cluster.coordination.line import Line
from cluster.coordination.news import Newsroom
from cluster.coordination.placement import Placement, no_group
from cluster.coordination.reservations import Reservations
from cluster.coordination.terms import CoordinatorTerms
from cluster.coordination.timers import Timers
from cluster.coordination.view import View
from cluster.coordination.waiter import FOREVER, Waiter

WINDOW = 32
"""How far behind the head of a line one that fits is looked for."""
BUDGET = 64
"""Grants per call from one line."""


class Model:
    """What is kept per model: its line, and what its requests teach. `name` is what its groups are listed under."""

    def __init__(self, name: str, terms: CoordinatorTerms, chance: random.Random) -> None:
        self.name = name
        self.line = Line(terms.line)
        self.experience = Experience()
        self.drain = Drain(chance)


class Dispatch:
    """`view` holds groups and grants, `news` what is told to the ingresses; both are changed here."""

    def __init__(self, view: View, news: Newsroom, terms: CoordinatorTerms, chance: random.Random) -> None:
        self.models: dict[str, Model] = {}
        self.waiting: dict[str, Waiter] = {}
        self.given = 0
        self.refused: Counter[str] = Counter()
        self.placement = Placement(view, terms.bounds)
        self._view = view
        self._news = news
        self._terms = terms
        self._chance = chance
        self._serial = 0
        self._deadlines: Timers[Waiter] = Timers()
        self._reservations = Reservations(view, self.placement, terms.line, self.offer)
        self._room: dict[GroupView, None] = {}

    def model(self, name: str) -> Model:
        """What is kept of the model that is called `name`."""
        name = self._view.resolve(name)
        if name not in self.models:
            self.models[name] = Model(name, self._terms, self._chance)
        return self.models[name]

    def is_full(self, name: str) -> bool:
        """Whether the line of the model that is called `name` takes no more."""
        model = self.models.get(self._view.resolve(name))
        return model is not None and model.line.full

    def rule(self, terms: CoordinatorTerms) -> None:
        """These hold from now on."""
        self._terms = terms
        self._reservations.bounds = terms.line
        for model in self.models.values():
            model.line.bounds = terms.line

    # -- asks ---------------------------------------------------------------------------------------------------------

    def place(self, ingress: str, ask: Ask, now: float) -> Grant | Ticket | Refusal:
        """The answer to an ask that has neither a grant nor a place yet."""
        if ask.left is not None and ask.left <= 0:
            return self.refuse(_late(ask))
        name = self._view.resolve(ask.model)
        obstacle = self.placement.obstacle(name, ask, now)
        if obstacle is not None:
            return self.refuse(obstacle)
        model = self.model(name)
        output = model.experience.expect(ask.share.tenant, ask.max_tokens)
        if not len(model.line):
            group = self.placement.find(name, ask, output, now)
            if group is not None:
                return self._grant(group, ask, output, now)
        bound = model.line.obstacle(ask, ask.prompt_tokens + output)
        if bound is not None:
            return self.refuse(_full(ask, bound[0], model.drain.retry_after(bound[1], now)))
        waiter = self._queue(model, ingress, ask, output, now)
        grant = self._look_again(model, waiter, now)
        if grant is not None:
            return grant
        self._reservations.consider(waiter, now)
        return self.ticket(waiter, now)

    def ticket(self, waiter: Waiter, now: float) -> Ticket:
        """Its place in the line now."""
        ask, line = waiter.ask, self.models[waiter.model].line
        ahead = line.ahead_of(waiter)
        wait = self.models[waiter.model].drain.wait_for((ahead + 1) * line.tokens / len(line), now)
        return Ticket(ask.request, ask.attempt, ahead, wait)

    def refuse(self, refusal: Refusal) -> Refusal:
        self.refused[refusal.code] += 1
        return refusal

    def drop(self, waiter: Waiter, now: float) -> None:
        """It leaves the line without an answer."""
        if waiter.waits:
            self.models[waiter.model].line.remove(waiter)
            self._forget(waiter, now)

    def expire(self, now: float) -> None:
        """Those whose deadline has passed get a refusal; batch work that has waited too long counts as interactive."""
        for _, waiter in self._deadlines.due(now):
            if waiter.waits:
                self._turn_away(waiter, _late(waiter.ask), now)
                self._view.end(waiter.ask.request, waiter.ask.attempt, now)
        self._deadlines.trim(len(self.waiting), lambda _, waiter: waiter.waits)
        for model in self.models.values():
            model.line.advance(now)

    def give_up_lost(self, now: float) -> None:
        """Groups are gone: refuse those whom no group that is left could ever run."""
        for waiter in list(self.waiting.values()):
            if self.placement.is_lost(waiter.model, waiter.ask, now):
                self._turn_away(waiter, no_group(waiter.ask), now)

    # -- room ---------------------------------------------------------------------------------------------------------

    def offer(self, group: GroupView) -> None:
        """There may be room in `group`: `serve` will look."""
        if self.waiting:
            self._room[group] = None

    def serve(self, now: float) -> None:
        """Give the room that was offered to whoever is next, to each group only what fits there."""
        while self._room:
            group, _ = self._room.popitem()
            if group.listed:
                self._serve_reserved(group, now)
                for line in self._lines_of(group):
                    self._serve_line(group, line, now)

    def sweep(self, now: float) -> None:
        """What time alone has changed: reservations that are due or void; room that nobody has reported."""
        self._reservations.release_void(now)
        for model in self.models.values():
            if len(model.line):
                self._look_again(model, None, now)
                self._reservations.review(list(islice(model.line.walk(), WINDOW)), now)
        self.serve(now)

    def check(self) -> None:
        """Recount everything from scratch."""
        assert len(self.waiting) == sum(len(model.line) for model in self.models.values())
        for model in self.models.values():
            model.line.check()
        assert all(waiter.waits for waiter in self.waiting.values())
        self._reservations.check(self.waiting)

    def _lines_of(self, group: GroupView) -> list[Line]:
        names = dict.fromkeys([*map(self._view.resolve, group.card.models), *group.card.models])
        lines = [self.models[name].line for name in names if name in self.models and len(self.models[name].line)]
        return sorted(lines, key=lambda line: next(line.walk()).arrived) if len(lines) > 1 else lines

    def _serve_reserved(self, group: GroupView, now: float) -> None:
        waiter = group.reserved
        if waiter is not None and has_room(
            group, waiter.ask, blocks_for(group, waiter.ask, waiter.output), now, waiter
        ):
            self._give(group, waiter, now)

    def _serve_line(self, group: GroupView, line: Line, now: float) -> None:
        for _ in range(BUDGET):
            if not is_open(group, line.best):
                return
            passed: list[Waiter] = []
            for waiter in islice(line.walk(), WINDOW):
                blocks = blocks_for(group, waiter.ask, waiter.output)
                if can_hold(group, waiter.ask) and has_room(group, waiter.ask, blocks, now, waiter):
                    break
                passed.append(waiter)
            else:
                return
            self._give(group, waiter, now)
            self._reservations.passed(passed, now)

    def _look_again(self, model: Model, newcomer: Waiter | None, now: float) -> Grant | None:
        """Try all groups for those near the head whose turn has not come before, in order: the newcomer, above all.
        For nobody in particular, try the very first. Returns the newcomer's grant; others are told by news."""
        for _ in range(BUDGET):
            passed: list[Waiter] = []
            found: GroupView | None = None
            for waiter in islice(model.line.walk(), WINDOW):
                if not waiter.tried or (newcomer is None and not passed):
                    found = self.placement.find(model.name, waiter.ask, waiter.output, now, waiter)
                    if found is not None:
                        break
                    waiter.tried_at = min(waiter.tried_at, now)
                if waiter is newcomer:
                    break
                passed.append(waiter)
            if found is None:
                return None
            grant = self._give(found, waiter, now, tell=waiter is not newcomer)
            self._reservations.passed(passed, now)
            if waiter is newcomer:
                return grant
        return None

    # -- grants -------------------------------------------------------------------------------------------------------

    def _queue(self, model: Model, ingress: str, ask: Ask, output: int, now: float) -> Waiter:
        self._serial += 1
        deadline = FOREVER if ask.left is None else now + ask.left
        waiter = Waiter(ask, ingress, model.name, now - ask.age, deadline, output, self._serial)
        model.line.add(waiter)
        self.waiting[ask.request] = waiter
        self._news.expect(ingress, waiter, now)
        if deadline != FOREVER:
            self._deadlines.add(deadline, waiter)
        return waiter

    def _give(self, group: GroupView, waiter: Waiter, now: float, *, tell: bool = True) -> Grant:
        self.models[waiter.model].line.take(waiter, now)
        self._forget(waiter, now)
        grant = self._grant(group, waiter.ask, waiter.output, now)
        if tell:
            self._news.post(waiter.ingress, grant)
        return grant

    def _grant(self, group: GroupView, ask: Ask, output: int, now: float) -> Grant:
        self.given += 1
        card, term = group.card, self._terms.bounds.grant_s
        name = f"{card.group}/{group.epoch}/{self.given}"
        blocks = blocks_for(group, ask, output)
        grant = Grant(name, ask.request, ask.attempt, card.group, group.epoch, card.address, blocks, term)
        # What a group has taken is known with its next report only.
        until = now + max(term, 2 * self._view.beat_s)
        over = overbooked(group, ask, blocks)
        self._view.open(group, OpenGrant(grant, ask, ask.prompt_tokens + output, until, over=over), now)
        self.placement.affinity.remember(ask.affinity, group.incarnation, now)
        return grant

    def _turn_away(self, waiter: Waiter, refusal: Refusal, now: float) -> None:
        self.drop(waiter, now)
        self._news.post(waiter.ingress, self.refuse(refusal))

    def _forget(self, waiter: Waiter, now: float) -> None:
        """It has left its line."""
        request = waiter.ask.request
        del self.waiting[request]
        self._news.forget(waiter.ingress, request)
        self._reservations.release(waiter, now)


def _late(ask: Ask) -> Refusal:
    message = "The request's deadline passed while it waited for its turn."
    return Refusal(ask.request, ask.attempt, REFUSED_LATE, message)


def _full(ask: Ask, code: str, retry_after: float) -> Refusal:
    if code == REFUSED_FULL:
        what = f"The waiting line of model {ask.model!r} is full"
    else:
        what = f"{ask.share.max_waiting} requests of tenant {ask.share.tenant!r} wait already"
    return Refusal(ask.request, ask.attempt, code, f"{what}; try again in {retry_after:.0f} s.", retry_after)
