"""The times of one request: since when it is here, until when it may be, when it tries again. Decides nothing else.

`now` and everything derived from it are seconds of one clock, that of whoever drives the request.
"""

from __future__ import annotations

from cluster.coordination.grants import Refusal
from cluster.requests import moves
from cluster.requests.work import Endurance, Phase, Work

LONGEST_REST_S = 1.0
"""Between asks when no group is up, or between attempts when one after another goes wrong."""
SHORT_REST_S = 0.25
"""The same when nobody has said how long to wait."""

NEVER = float("inf")
_SPENT = float("-inf")

_OUTSIDE = (Phase.ASKING, Phase.RESTING, Phase.SUBMITTING)


class Patience:
    """`timeout_s` is the work's own, else the server's; None: no deadline."""

    def __init__(self, work: Work, endurance: Endurance) -> None:
        self._endurance = endurance
        self._timeout_s = endurance.timeout_s if work.timeout_s is None else work.timeout_s
        self._arrived = 0.0
        self._deadline = NEVER
        self._give_up = NEVER
        self._again_at = NEVER
        self._wake: float | None = None

    def start(self, now: float) -> None:
        """The request has arrived."""
        self._arrived = now
        if self._timeout_s is not None:
            self._deadline = now + self._timeout_s
        self._give_up = now + self._endurance.patience_s

    def restart(self, now: float, *, replay: bool) -> None:
        """It waits outside the line anew: behind a run, or because the line is lost."""
        bounded = replay and self._deadline < NEVER
        self._give_up = NEVER if bounded else now + self._endurance.patience_s

    def rest(self, now: float, refusal: Refusal | None) -> None:
        """Try again in a while, about as long as the last refusal wanted it."""
        wanted = refusal.retry_after if refusal else None
        self._again_at = now + min(LONGEST_REST_S, wanted or SHORT_REST_S)

    def queue(self, now: float) -> None:
        """It stands in the line: look after a while whether it still does."""
        self._again_at = now + self._endurance.confirm_s

    def age(self, now: float) -> float:
        """Seconds since its arrival."""
        return now - self._arrived

    def left(self, now: float) -> float | None:
        """Seconds until its deadline, None without one."""
        return max(0.0, self._deadline - now) if self._deadline < NEVER else None

    def is_fresh(self, now: float) -> bool:
        """Whether it has only just come."""
        return now - self._arrived < self._endurance.grace_s

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return now >= self._deadline

    def is_out(self, phase: Phase, now: float) -> bool:
        """Whether it has waited in vain for too long."""
        return phase in _OUTSIDE and now >= self._give_up

    def is_due(self, phase: Phase, now: float) -> bool:
        """Whether it is time to ask again."""
        return phase in (Phase.RESTING, Phase.QUEUED) and now >= self._again_at

    def spend_wake(self) -> None:
        """The last Wake has come: even a little early, since event loops round to milliseconds."""
        self._wake = _SPENT

    def wake(self, phase: Phase) -> tuple[moves.Wake, ...]:
        """The alarm, where it is another one than before."""
        alarm = self._alarm(phase)
        if alarm == self._wake:
            return ()
        self._wake = alarm
        return (moves.Wake(alarm),)

    def _alarm(self, phase: Phase) -> float | None:
        """When to look at it next; None: not by itself."""
        at = NEVER
        if phase is not Phase.ENDED:
            again = self._again_at if phase in (Phase.RESTING, Phase.QUEUED) else NEVER
            at = min(self._deadline, again, self._give_up if phase in _OUTSIDE else NEVER)
        return None if at == NEVER else at
