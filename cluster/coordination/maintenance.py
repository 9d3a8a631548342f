"""What an operator has asked of single groups: to get nothing new, to be emptied, to be built anew.

A group is emptied by giving it nothing new until what runs there has ended, or has been handed over when its time is
up. Pure: knows names, epochs and time; how a group is told is its user's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Errand:
    """Empty the incarnation `epoch` of a group by `until`; `restart`: then build it anew, after which it takes work
    again if `reopen`."""

    epoch: int
    until: float
    restart: bool = False
    reopen: bool = False


class Maintenance:
    """`cordoned` are the groups that get nothing new. A group keeps its name over its incarnations."""

    def __init__(self, cordoned: Iterable[str] = ()) -> None:
        self.cordoned = set(cordoned)
        self._errands: dict[str, Errand] = {}

    def cordon(self, group: str) -> None:
        """Nothing new goes there from now on."""
        self.cordoned.add(group)

    def uncordon(self, group: str) -> None:
        """It takes work again; whatever else was asked of it is off."""
        self.cordoned.discard(group)
        self._errands.pop(group, None)

    def empty(self, group: str, epoch: int, until: float, *, restart: bool = False) -> None:
        """Drain it, or restart it. Once drained it stays cordoned; restarted, it is as it was before."""
        known = self._errands.get(group)
        reopen = restart and (known.reopen if known else group not in self.cordoned)
        self._errands[group] = Errand(epoch, until, restart, reopen)
        self.cordoned.add(group)

    def joined(self, group: str, epoch: int) -> None:
        """A group has (re)joined: another incarnation than the one that was to be built anew is its successor."""
        errand = self._errands.get(group)
        if errand is None or errand.epoch == epoch:
            return
        del self._errands[group]
        if errand.reopen:
            self.cordoned.discard(group)

    def forget(self, group: str) -> None:
        """It is gone and will not come back."""
        self.uncordon(group)

    def orders(self, group: str, *, idle: bool, now: float) -> tuple[bool, bool]:
        """(hand over what runs, build anew) for the group, given whether anything is left there."""
        errand = self._errands.get(group)
        if errand is None:
            return False, False
        return not idle and now >= errand.until, idle and errand.restart

    def word(self, group: str, *, idle: bool, now: float) -> str:
        """What is going on with it, for people; "" when nothing is."""
        errand = self._errands.get(group)
        if errand is None:
            return ""
        if not idle:
            left = errand.until - now
            return f"draining, {left:.0f} s left" if left > 0 else "handing over"
        return "restarting" if errand.restart else "drained"
