"""The grants open in one incarnation of a group, and what they commit there. Integers only; knows no placement.

A grant is issued, then accepted by the group, then closed; or it turns void (expired, withdrawn) and stays committed
until the group has said that it will not, or does no longer, run it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.coordination.grants import Ask, Grant
from workers.plan import GroupReport


class Stage(Enum):
    """Where a grant stands."""

    ISSUED = "issued"
    ACCEPTED = "accepted"
    VOID = "void"


@dataclass(slots=True, eq=False)
class OpenGrant:
    """`seen`: the group has told that it took the grant. `withdrawn`: its owner wants no more of it, so that it stays
    void even while its request still runs; an expired one that turns out to run is a good grant again."""

    grant: Grant
    ask: Ask
    expires_at: float
    stage: Stage = Stage.ISSUED
    seen: bool = False
    withdrawn: bool = False


class Ledger:
    """`blocks` and the number of grants are what was given; the corrections are what the group's last report says
    beyond that: growth past the expected output, requests of an earlier coordinator's life (both positive), or blocks
    that several sequences share (negative)."""

    def __init__(self) -> None:
        self.open: dict[str, OpenGrant] = {}
        self.void: dict[str, None] = {}
        self.fresh_tokens = 0
        self._blocks = 0
        self._block_correction = 0
        self._slot_correction = 0

    @property
    def committed(self) -> int:
        """Blocks."""
        return max(0, self._blocks + self._block_correction)

    @property
    def slots(self) -> int:
        """Sequences, running, waiting and granted."""
        return len(self.open) + self._slot_correction

    def add(self, entry: OpenGrant) -> None:
        """A new grant. `fresh_tokens` counts prompts of grants that no report has shown yet."""
        assert entry.grant.id not in self.open, f"grant {entry.grant.id} given twice"
        self.open[entry.grant.id] = entry
        self._blocks += entry.grant.blocks
        self.fresh_tokens += entry.ask.prompt_tokens

    def close(self, grant: str) -> OpenGrant | None:
        """The grant has ended and given back what it held; None when it was closed before."""
        entry = self.open.pop(grant, None)
        if entry is None:
            return None
        self.void.pop(grant, None)
        self._blocks -= entry.grant.blocks
        if not entry.seen:
            self.fresh_tokens -= entry.ask.prompt_tokens
        elif self._block_correction < 0:
            # Its share of shared blocks may still be held by others: believe so until the group's next report.
            self._block_correction = min(0, self._block_correction + entry.grant.blocks)
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
        blocks = count = 0
        for entry in self.open.values():
            if entry.seen:
                blocks += entry.grant.blocks
                count += 1
        self._block_correction = report.committed - blocks
        self._slot_correction = max(0, report.running + report.waiting - count)
        return closed

    def _see(self, grant: str) -> None:
        entry = self.open.get(grant)
        if entry is not None and not entry.seen:
            entry.seen = True
            self.fresh_tokens -= entry.ask.prompt_tokens
            if entry.stage is Stage.ISSUED:
                entry.stage = Stage.ACCEPTED

    def _revive(self, grant: str) -> None:
        self._see(grant)
        entry = self.open.get(grant)
        if entry is not None and entry.stage is Stage.VOID and not entry.withdrawn:
            entry.stage = Stage.ACCEPTED
            del self.void[grant]
