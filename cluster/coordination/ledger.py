"""The grants open in one incarnation of a group, and what they commit there. Integers only; knows no placement.

A grant is issued, then accepted by the group, then closed; or it turns void (expired, withdrawn) and stays committed
until the group has said that it will not, or does no longer, run it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.coordination.grants import Ask, Grant
from workers.plan import GroupReport
from workers.sequence import Priority


class Stage(Enum):
    """Where a grant stands."""

    ISSUED = "issued"
    ACCEPTED = "accepted"
    VOID = "void"


@dataclass(slots=True, eq=False)
class OpenGrant:
    """`cost` is what a line counts its request as: tokens, prompt and expected output.
    `seen`: the group has told that it took the grant. `withdrawn`: its owner wants no more of it, so that it stays
    void even while its request still runs; an expired one that turns out to run is a good grant again. `over` are the
    blocks that it was given though they were committed to batch work, which must make way for it. `guest`: it lives in
    the room that is kept for guests."""

    grant: Grant
    ask: Ask
    cost: int
    expires_at: float
    stage: Stage = Stage.ISSUED
    seen: bool = False
    withdrawn: bool = False
    over: int = 0
    guest: bool = False

    @property
    def is_batch(self) -> bool:
        return self.ask.priority is Priority.BATCH


class Ledger:
    """What the group has told is its forecast: the most blocks that its live requests will hold at one time, which is
    less than the sum of their grants where they share blocks or peak at different times, and more where they outgrew
    their grants or belong to an earlier coordinator's life. Grants that no report has shown yet come on top.
    `batch` counts open grants of batch work."""

    def __init__(self) -> None:
        self.open: dict[str, OpenGrant] = {}
        self.void: dict[str, None] = {}
        self.fresh_tokens = 0
        self.batch = 0
        self._batch_blocks = 0
        self._batch_seen_blocks = 0
        self._over = 0
        self._blocks = 0
        self._seen_blocks = 0
        self._seen = 0
        self._forecast = 0
        self._forecast_blocks = 0
        self._strangers = 0

    @property
    def unseen_blocks(self) -> int:
        """Blocks of grants that no report has shown yet."""
        return self._blocks - self._seen_blocks

    @property
    def committed(self) -> int:
        """Blocks."""
        return self.unseen_blocks + self._expected()

    @property
    def committed_ahead(self) -> int:
        """Blocks, less those of batch work, which makes way for interactive work."""
        unseen = self.unseen_blocks - (self._batch_blocks - self._batch_seen_blocks)
        expected = self._expected()
        if self._seen_blocks:
            expected -= min(self._batch_seen_blocks, expected * self._batch_seen_blocks // self._seen_blocks)
        return unseen + expected

    @property
    def overbooked(self) -> int:
        """Blocks that were given to interactive work on top of batch work that has not ended."""
        return min(self._over, self._batch_blocks)

    @property
    def slots(self) -> int:
        """Sequences, running, waiting and granted."""
        return len(self.open) + self._strangers

    def add(self, entry: OpenGrant) -> None:
        """A new grant. `fresh_tokens` counts prompts of grants that no report has shown yet."""
        assert entry.grant.id not in self.open, f"grant {entry.grant.id} given twice"
        self.open[entry.grant.id] = entry
        self._blocks += entry.grant.blocks
        self._over += entry.over
        self.fresh_tokens += entry.ask.prompt_tokens
        if entry.is_batch:
            self.batch += 1
            self._batch_blocks += entry.grant.blocks

    def close(self, grant: str) -> OpenGrant | None:
        """The grant has ended and given back what it held; None when it was closed before."""
        entry = self.open.pop(grant, None)
        if entry is None:
            return None
        self.void.pop(grant, None)
        blocks = entry.grant.blocks
        self._blocks -= blocks
        self._over -= entry.over
        if entry.is_batch:
            self.batch -= 1
            self._batch_blocks -= blocks
        if entry.seen:
            self._count_seen(entry, -1)
        else:
            self.fresh_tokens -= entry.ask.prompt_tokens
        return entry

    def cancel(self, grant: str, *, withdrawn: bool) -> None:
        """The grant expired or was withdrawn: void until the group acknowledges."""
        entry = self.open.get(grant)
        if entry is not None:
            entry.stage = Stage.VOID
            entry.withdrawn = entry.withdrawn or withdrawn
            self.void[grant] = None

    def reconcile(self, report: GroupReport) -> list[OpenGrant]:
        """Take in a newer report of this incarnation; what has ended by it is closed and returned."""
        ended = [grant for grant in report.voided if grant in self.void]
        for grant in report.accepted:
            self._see(grant)
        if report.live is not None:
            live = frozenset(report.live)
            for grant in report.live:
                self._revive(grant)
            ended += [grant for grant, entry in self.open.items() if entry.seen and grant not in live]
        closed = [entry for entry in map(self.close, dict.fromkeys(ended)) if entry is not None]
        self._forecast, self._forecast_blocks = report.committed, self._seen_blocks
        self._strangers = max(0, report.running + report.waiting - self._seen)
        return closed

    def check(self) -> None:
        """Recompute every sum from scratch."""
        entries = self.open.values()
        seen = [entry for entry in entries if entry.seen]
        assert self._blocks == sum(entry.grant.blocks for entry in entries)
        assert (self._seen, self._seen_blocks) == (len(seen), sum(entry.grant.blocks for entry in seen))
        batch = [entry for entry in entries if entry.is_batch]
        assert (self.batch, self._batch_blocks) == (len(batch), sum(entry.grant.blocks for entry in batch))
        assert self._batch_seen_blocks == sum(entry.grant.blocks for entry in batch if entry.seen)
        assert self._over == sum(entry.over for entry in entries) and self.committed_ahead >= 0
        assert self.fresh_tokens == sum(entry.ask.prompt_tokens for entry in entries if not entry.seen)
        assert set(self.void) == {name for name, entry in self.open.items() if entry.stage is Stage.VOID}
        assert self.committed >= 0 and self.slots >= 0

    def _expected(self) -> int:
        """The last report's forecast, less what has ended since: its part of a forecast below the sum of grants, but
        what is left of them peaks at no less than their mean."""
        told, before, left = self._forecast, self._forecast_blocks, self._seen_blocks
        if told >= before:
            return left + told - before
        if not left:
            return 0
        return max(-(-told * left // before), -(-left // self._seen))

    def _see(self, grant: str) -> None:
        entry = self.open.get(grant)
        if entry is not None and not entry.seen:
            entry.seen = True
            self._count_seen(entry, 1)
            self.fresh_tokens -= entry.ask.prompt_tokens
            if entry.stage is Stage.ISSUED:
                entry.stage = Stage.ACCEPTED

    def _count_seen(self, entry: OpenGrant, one: int) -> None:
        self._seen += one
        self._seen_blocks += one * entry.grant.blocks
        if entry.is_batch:
            self._batch_seen_blocks += one * entry.grant.blocks

    def _revive(self, grant: str) -> None:
        self._see(grant)
        entry = self.open.get(grant)
        if entry is not None and entry.stage is Stage.VOID and not entry.withdrawn:
            entry.stage = Stage.ACCEPTED
            del self.void[grant]
