"""The grants of one request: which one it holds, and that each is closed exactly once.

A grant without an id is one that the ingress gave itself: nobody waits to hear how it ended.
"""

from __future__ import annotations

from cluster.coordination.grants import Grant
from cluster.requests import moves
from cluster.requests.moves import Action
from cluster.requests.work import Attempt, Work
from workers.plan import Finish


class Account:
    """`current` is the attempt that holds a grant. The methods return what is to be done."""

    def __init__(self, work: Work) -> None:
        self.current: Attempt | None = None
        self._work = work
        self._closed: set[str] = set()
        self._overtaken: dict[int, Grant] = {}

    def is_open(self, grant: Grant) -> bool:
        """Whether it may still be used."""
        return grant.id not in self._closed

    def take(self, grant: Grant, output: list[int]) -> Attempt:
        """Use it, behind the `output` that was sent."""
        self.current = Attempt(grant, tuple(output))
        return self.current

    def refuse(self, grant: Grant) -> tuple[Action, ...]:
        """Give it back unused, unless it is the one that is held."""
        if self.current is not None and self.current.grant.id == grant.id:
            return ()
        return self._close(moves.Withdraw(grant.id), grant.id)

    def give_back(self) -> Grant:
        """The group has not taken it. The caller closes it with `refuse`."""
        assert self.current is not None
        grant, self.current = self.current.grant, None
        return grant

    def finish(self, finish: Finish, sent: int, *, submitting: bool, satisfied: bool = False) -> tuple[Action, ...]:
        """Close the one that is held, if any, when the client has been sent `sent` tokens; what its group may still run
        is aborted. `submitting`: whether the group has it is not known. `satisfied`: the client wanted no more."""
        current, self.current = self.current, None
        if current is None:
            return ()
        actions: tuple[Action, ...] = ()
        if finish is Finish.ABORT:
            actions = (moves.Abort(current.grant),)
            if submitting:
                self._overtaken[current.grant.attempt] = current.grant
        outcome = current.outcome(self._work, finish, sent, satisfied=satisfied)
        return actions + self._close(moves.Settle(outcome), current.grant.id)

    def abort_again(self, attempt: int) -> tuple[Action, ...]:
        """A group has taken an attempt that was given up: its abort may have come before it, so say it again, now that
        the group certainly knows the attempt."""
        grant = self._overtaken.pop(attempt, None)
        return () if grant is None else (moves.Abort(grant),)

    def _close(self, action: moves.Settle | moves.Withdraw, grant: str) -> tuple[Action, ...]:
        if not grant or grant in self._closed:
            return ()
        self._closed.add(grant)
        return (action,)
