"""One incarnation of a group as the coordinator sees it: its card, its grants, its last report, its load and level.

The group is the truth, this is a view of it. Decides nothing and knows no clock.
"""

from __future__ import annotations

from cluster.coordination.cards import GroupCard, GroupState, Standing
from cluster.coordination.chains import Chains
from cluster.coordination.grants import Incarnation
from cluster.coordination.guests import Guests
from cluster.coordination.ladder import Ladder
from cluster.coordination.ledger import Ledger, OpenGrant
from cluster.coordination.terms import CoordinatorTerms, Thresholds
from cluster.coordination.waiter import Waiter
from workers.orders import GroupTerms
from workers.plan import GroupReport, Limits

_CLOSED = 1000.0
"""What a group that gets nothing ranks behind those that do."""
_LEAST_S = 0.1
"""Between two reports that tell a speed."""


class GroupView:
    """`seqs` and `step_tokens` are what live settings let it have of its sequences and of a step's tokens; one that is
    `leaving` `returns` if its successor is on its way. `load` is its fullest resource as a share: blocks, slots,
    prefill backlog; `rank` orders groups for new work. `guests` are tenants that have nothing else there. `reserved` is
    who it is kept free for, `alone` the grant that nothing else may run beside. `place` is its own in the roster, None
    while it may get nothing; `watch_at` belongs to the view."""

    def __init__(self, card: GroupCard, epoch: int, number: int, now: float, terms: CoordinatorTerms) -> None:
        bounds = terms.bounds
        self.card = card
        self.epoch = epoch
        self.number = number
        self.incarnation: Incarnation = (card.group, epoch)
        self.ledger = Ledger()
        self.chains = Chains()
        self.ladder = Ladder(terms.ladder, now)
        self.report: GroupReport | None = None
        self.reported_at = now
        self.progressed_at = now
        self.leaving = self.returns = self.cordoned = False
        self.longest = card.longest
        self.block_limit = int(card.blocks * (1 - bounds.watermark))
        self._bounds = bounds
        self.seqs, self.step_tokens = card.max_num_seqs, card.max_num_batched_tokens
        self._size()
        self.guests = Guests(int(bounds.guest_share * card.blocks), bounds.guest_s)
        self.load = 0.0
        self.rank = 0.0
        self.reserved: Waiter | None = None
        self.alone = ""
        self.place: tuple[float, int] | None = None
        self.watch_at = now
        self._freed = 0
        self._backlog = 0.0
        self._backlog_at = now
        self._prefill_rate = 0.0

    @property
    def listed(self) -> bool:
        """Whether it may get work."""
        return self.place is not None

    @property
    def awaited(self) -> bool:
        """Whether it, or its successor, will take work again though it does not now."""
        return self.returns or self.cordoned

    @property
    def limits(self) -> Limits:
        """What a step may hold there now."""
        return self.ladder.limits(self.seqs, self.step_tokens)

    def restrict(self, terms: GroupTerms, thresholds: Thresholds) -> None:
        """Settings that are live: what it may have of what it was built with, and when its ladder moves."""
        built = Limits(self.card.max_num_seqs, self.card.max_num_batched_tokens, self.card.max_num_batched_tokens)
        capped = terms.capped(built)
        self.seqs, self.step_tokens = capped.max_num_seqs, capped.max_num_batched_tokens
        self._size()
        self.ladder.thresholds = thresholds

    def standing(self, now: float, lapse_s: float, stall_s: float) -> Standing:
        """Whether it takes new work: reports keep coming, and steps advance while there is work."""
        if self.leaving or self.cordoned:
            return Standing.LEAVING
        if now - self.reported_at > lapse_s:
            return Standing.LAPSED
        return Standing.STALLED if now - self.progressed_at > stall_s else Standing.UP

    def backlog(self, now: float) -> float:
        """Prompt tokens that wait to be computed: as last told, less what it has probably done since."""
        return max(0.0, self._backlog - self._prefill_rate * (now - self._backlog_at))

    def load_with(self, blocks: int, tokens: int, now: float) -> float:
        """Its load if one more request of `blocks` and `tokens` prompt tokens came."""
        card, ledger = self.card, self.ledger
        return max(
            (ledger.committed + blocks) / card.blocks,
            (ledger.slots + 1) / self.seqs,
            (self.backlog(now) + tokens) / self.backlog_limit,
        )

    @property
    def occupied(self) -> int:
        """Blocks that are held, as last told, less those of grants that ended since, and those of grants that no report
        has shown yet."""
        held = self.report.pool.held if self.report else 0
        return max(0, held - self._freed) + self.ledger.unseen_blocks

    def refresh(self, now: float) -> None:
        """Compute `load` and `rank` anew: call after every change."""
        card, ledger = self.card, self.ledger
        self.load = max(
            ledger.committed / card.blocks,
            ledger.slots / self.seqs,
            self.backlog(now) / self.backlog_limit,
        )
        closed = bool(self.alone) or self.reserved is not None or (self.ladder.shrinks and ledger.slots > 0)
        self.rank = self.load + _CLOSED if closed else self.load

    def open(self, entry: OpenGrant, now: float) -> None:
        """A grant has been given."""
        self.ledger.add(entry)
        self._backlog = self.backlog(now) + entry.ask.prompt_tokens
        self._backlog_at = now
        if entry.ask.alone:
            self.alone = entry.grant.id
        entry.guest = self.guests.opened(entry.ask.share.tenant, entry.grant.blocks, now)

    def ended(self, entry: OpenGrant) -> None:
        """The ledger has closed this entry."""
        if self.alone == entry.grant.id:
            self.alone = ""
        self.guests.ended(entry.ask.share.tenant, entry.grant.blocks, guest=entry.guest)
        self._freed += entry.grant.blocks if entry.seen else 0

    def take(self, report: GroupReport, now: float) -> list[OpenGrant] | None:
        """Take in a report; returns the grants that ended by it, None when it is older than the last."""
        last = self.report
        if last is not None and report.sequence <= last.sequence:
            return None
        idle = not report.running and not report.waiting
        if last is None or idle or report.step > last.step or not (last.running or last.waiting):
            self.progressed_at = now
        if last is not None:
            self._learn_speed(last, report, now - self.reported_at)
        self.report = report
        self.reported_at = now
        self.chains.update(report.sessions, now, full=report.full)
        ended = self.ledger.reconcile(report)
        for entry in ended:
            self.ended(entry)
        self._freed = 0
        self._backlog = float(report.waiting_tokens + self.ledger.fresh_tokens)
        self._backlog_at = now
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
            level=self.ladder.level.label,
            cordoned=self.cordoned,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs there, nor may begin to."""
        report = self.report
        return report is not None and not self.ledger.open and not report.running and not report.waiting

    def _size(self) -> None:
        bounds = self._bounds
        self.slot_limit = self.seqs + max(1, int(bounds.slots_ahead * self.seqs))
        self.backlog_limit = bounds.backlog_steps * self.step_tokens

    def _learn_speed(self, last: GroupReport, report: GroupReport, seconds: float) -> None:
        """Tokens computed per second, as far as there was enough to do."""
        if seconds < _LEAST_S:
            return
        rate = max(0, report.computed_tokens - last.computed_tokens) / seconds
        if rate > self._prefill_rate or last.waiting_tokens:
            self._prefill_rate += (rate - self._prefill_rate) / 2 if self._prefill_rate else rate
