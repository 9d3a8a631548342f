"""One ask that waits in a line: whose it is, what it costs, since when. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.coordination.grants import Ask
from workers.sequence import Priority

FOREVER = float("inf")

TenantKey = tuple[str, Priority]
"""Whose turn it is, within a class: the tenant and the class that it asked for. A tenant's overdue batch work takes
turns with its interactive work instead of going before all of it."""


@dataclass(slots=True, eq=False)
class Waiter:
    """`model` is the name that its line is kept under; `arrived` is when the request first came, `deadline` when it is
    of no use any more, `output` the tokens it is expected to generate. At `tried_at` its turn came, and there was no
    room; `passed` others went before it since, the first of them at `passed_at`; `reserved`: a group is kept free for
    it. `waits`: it stands in its line."""

    ask: Ask
    ingress: str
    model: str
    arrived: float
    deadline: float
    output: int
    serial: int
    waits: bool = False
    band: Priority = Priority.INTERACTIVE
    rank: int = 0
    tried_at: float = FOREVER
    passed: int = 0
    passed_at: float = FOREVER
    reserved: bool = False

    @property
    def cost(self) -> int:
        """Tokens: prompt and expected output."""
        return self.ask.prompt_tokens + self.output

    @property
    def tried(self) -> bool:
        """Whether its turn has come before."""
        return self.tried_at < FOREVER

    @property
    def tenant(self) -> TenantKey:
        return (self.ask.share.tenant, self.ask.priority)

    def let_pass(self, now: float) -> None:
        """Another one, behind it, was granted."""
        self.passed += 1
        self.passed_at = min(self.passed_at, now)
