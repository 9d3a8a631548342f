"""What the codes of a coordinator and of a group mean to a request that hears them, after all it has been through."""

from __future__ import annotations

from enum import Enum

from cluster.coordination.grants import (
    REFUSED_FULL,
    REFUSED_LATE,
    REFUSED_NEVER_FITS,
    REFUSED_NO_GROUP,
    REFUSED_STALE,
    REFUSED_TENANT,
    Refusal,
)
from cluster.requests.history import History
from workers.errors import (
    CODE_DEAD,
    CODE_DRAINING,
    CODE_DUPLICATE,
    CODE_FULL,
    CODE_NEVER_FITS,
    CODE_NO_LEASE,
    CODE_VOID,
)

FAILED = "generation_failed"
"""The code of a request that ended for no fault of its own; neither coordinator nor group say it."""
POISONED = "poisoned_request"
"""The code of one that kills groups."""
TIMED_OUT = REFUSED_LATE


class Verdict(Enum):
    """FAIL: it ends with this. LATE: its time is up. REST: ask again in a while. MISS: this attempt has come to
    nothing. SHUN: the same, and never that group again. NEXT: try another group, this costs nothing. ACCEPTED: the
    group has it already."""

    FAIL = 0
    LATE = 1
    REST = 2
    MISS = 3
    SHUN = 4
    NEXT = 5
    ACCEPTED = 6


def weigh_refusal(code: str, history: History, *, fresh: bool) -> Verdict:
    """The coordinator does not take an ask. What was admitted once does fit somewhere; who was in trouble has waited
    already and may wait on; and who has only just come (`fresh`) may come while the groups are not known again yet."""
    if code == REFUSED_LATE:
        return Verdict.LATE
    if code == REFUSED_STALE:
        return Verdict.MISS
    waits = (history.troubled and code != REFUSED_NEVER_FITS) or (fresh and code == REFUSED_NO_GROUP)
    return Verdict.REST if history.admitted or waits else Verdict.FAIL


def weigh_rejection(code: str, *, promised: bool) -> Verdict:
    """A group does not take an attempt. `promised`: the coordinator had granted it the room."""
    match code:
        case code if code == CODE_DUPLICATE:
            return Verdict.ACCEPTED
        case code if code in (CODE_DRAINING, CODE_DEAD):
            return Verdict.SHUN
        case code if code == CODE_FULL and not promised:
            return Verdict.NEXT
        case code if code in (CODE_VOID, CODE_NO_LEASE, CODE_FULL):
            return Verdict.MISS
    return Verdict.FAIL


def rejection_code(code: str) -> str:
    """The code that a client gets for a rejection for good."""
    return code if code == CODE_NEVER_FITS else FAILED


def tellable(history: History) -> Refusal | None:
    """The last refusal, where a request that gives up may end with it: one that was admitted never hears that it is
    not."""
    refusal = history.refusal
    if refusal is None or (history.admitted and refusal.code in (REFUSED_FULL, REFUSED_TENANT, REFUSED_NEVER_FITS)):
        return None
    return refusal
