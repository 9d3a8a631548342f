"""One request from ask to end: a pure state machine, on_event(event, now) -> actions.

Fences late answers by attempt and late tokens by attempt and epoch; replays what a dead group had under way, as a new
attempt that carries the output already sent; ends exactly once, and closes every grant it was given exactly once. After
its end it still takes in what is late, to give it back. Knows no asyncio, no Ray and no clock.
"""

from __future__ import annotations

from enum import Enum

from cluster.coordination.grants import REFUSED_NEVER_FITS, REFUSED_STALE, Grant, Incarnation, Refusal
from cluster.requests import moves
from cluster.requests.moves import Action, Event
from cluster.requests.work import Attempt, Endurance, Work
from workers.errors import CODE_DEAD, CODE_DRAINING, CODE_DUPLICATE, CODE_NEVER_FITS, CODE_NO_LEASE, CODE_VOID
from workers.plan import Finish, TokenEvent

FAILED = "generation_failed"
TIMED_OUT = "timed_out"

LONGEST_REST_S = 1.0
"""Between asks when no group is up, or between attempts when one after another goes wrong."""
SHORT_REST_S = 0.25
"""The same when nobody has said how long to wait."""

_NEVER = float("inf")


class Phase(Enum):
    """Where the request stands. ASKING, RESTING and SUBMITTING are waiting for a place."""

    NEW = 0
    ASKING = 1
    RESTING = 2
    SUBMITTING = 3
    RUNNING = 4
    ENDED = 5


class RequestMachine:
    """`output` is what the client has been sent, `attempt` the number of the attempt that counts, `current` that
    attempt while it holds a grant."""

    def __init__(self, work: Work, endurance: Endurance) -> None:
        self.work = work
        self.phase = Phase.NEW
        self.attempt = 0
        self.current: Attempt | None = None
        self.output: list[int] = []
        self.deaths = 0
        self.misses = 0
        self._endurance = endurance
        self._cached: int | None = None
        self._troubled = False
        self._avoid: tuple[Incarnation, ...] = ()
        self._refusal: Refusal | None = None
        self._closed: set[str] = set()
        self._overtaken: dict[int, Grant] = {}
        self._arrived = 0.0
        self._deadline = self._give_up = self._rest_until = _NEVER
        self._wake: float | None = None
        self._actions: list[Action] = []

    def on_event(self, event: Event, now: float) -> tuple[Action, ...]:
        """What to do now that `event` has happened, in this order."""
        match event:
            case moves.Arrived(epoch, news):
                self._take_news(epoch, news, now)
            case moves.Placed(answer):
                self._take_answer(answer, now)
            case moves.Submitted(attempt):
                self._take_acceptance(attempt)
            case moves.Ticked() if self.phase not in (Phase.NEW, Phase.ENDED):
                self._wake = -_NEVER  # spent, even if it came a little early: event loops round to milliseconds
                self._take_time(now)
            case moves.Started() if self.phase is Phase.NEW:
                self._start(now)
            case moves.Cancelled() if self.phase is not Phase.ENDED:
                self._finish_attempt(Finish.ABORT)
                self._end(moves.End())
            case moves.AskLost(attempt) if self.phase is Phase.ASKING and attempt == self.attempt:
                self._troubled = True
                self._rest(now)
            case moves.Rejected(attempt, code, message) if self._is_submitting(attempt):
                self._take_rejection(code, message, now)
            case moves.SubmitLost(attempt) if self._is_submitting(attempt):
                self._miss("the group did not answer", now)
            case moves.GroupLost(group, epoch, gone):
                self._lose_group(group, epoch, gone, now)
            case _:
                pass  # late: about an attempt or a state that is over
        self._set_alarm()
        actions, self._actions = tuple(self._actions), []
        return actions

    # -- waiting for a place ------------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self._arrived = now
        if self._endurance.timeout_s is not None:
            self._deadline = now + self._endurance.timeout_s
        self._give_up = now + self._endurance.patience_s
        self._ask(now)

    def _ask(self, now: float) -> None:
        self.phase = Phase.ASKING
        ask = self.work.ask(self.attempt, len(self.output), now - self._arrived, self._avoid)
        self._actions.append(moves.Place(ask))

    def _rest(self, now: float) -> None:
        """Ask again a little later."""
        wanted = self._refusal.retry_after if self._refusal else None
        self.phase = Phase.RESTING
        self._rest_until = now + min(LONGEST_REST_S, wanted or SHORT_REST_S)

    def _take_answer(self, answer: Grant | Refusal, now: float) -> None:
        waiting = self.phase in (Phase.ASKING, Phase.RESTING) and answer.attempt == self.attempt
        if isinstance(answer, Refusal):
            if waiting:
                self._take_refusal(answer, now)
        elif waiting and answer.id not in self._closed:
            self.phase = Phase.SUBMITTING
            self.current = Attempt(answer, tuple(self.output))
            self._actions.append(moves.Submit(answer, self.current.request(self.work, now - self._arrived)))
        elif self.current is None or self.current.grant.id != answer.id:
            self._close(moves.Withdraw(answer.id), answer.id)

    def _take_refusal(self, refusal: Refusal, now: float) -> None:
        self._refusal = refusal
        if refusal.code == REFUSED_STALE:
            self._miss("the coordinator has moved on", now)
        elif self._troubled and refusal.code != REFUSED_NEVER_FITS:
            self._rest(now)
        else:
            self._fail(refusal)

    def _take_rejection(self, code: str, message: str, now: float) -> None:
        assert self.current is not None
        if code == CODE_DUPLICATE:
            self._take_acceptance(self.attempt)
            return
        grant, self.current = self.current.grant, None
        self._close(moves.Withdraw(grant.id), grant.id)
        if code in (CODE_DRAINING, CODE_DEAD):
            self._shun(grant)
        if code in (CODE_DRAINING, CODE_DEAD, CODE_VOID, CODE_NO_LEASE):
            self._miss(message, now)
        else:
            self._fail_with(code if code == CODE_NEVER_FITS else FAILED, message)

    def _take_acceptance(self, attempt: int) -> None:
        if self._is_submitting(attempt):
            self.phase = Phase.RUNNING
        elif attempt in self._overtaken:
            # Its abort may have come before it: say it again, now that the group certainly knows the attempt.
            self._actions.append(moves.Abort(self._overtaken.pop(attempt)))

    # -- running ------------------------------------------------------------------------------------------------------

    def _take_news(self, epoch: int, news: TokenEvent, now: float) -> None:
        current = self.current
        if current is None or news.attempt != self.attempt or epoch < current.epoch:
            return
        have = len(self.output)
        if news.index > have:
            self._miss("output got lost on the way", now)
            return
        self.phase = Phase.RUNNING
        current.epoch, current.cached = epoch, news.cached
        if self._cached is None:
            self._cached = news.cached
        tokens = news.tokens[have - news.index :]
        self.output.extend(tokens)
        if news.finish is not None and news.finish is not Finish.ABORT:
            self._finish_attempt(news.finish)
            self._end(moves.End(self._event(tokens, have, news.finish, news.error)))
            return
        if tokens:
            self._actions.append(moves.Emit(self._event(tokens, have)))
        if news.finish is Finish.ABORT:
            self._miss("its group ended it unasked", now)

    def _event(
        self, tokens: tuple[int, ...], index: int, finish: Finish | None = None, error: str | None = None
    ) -> TokenEvent:
        return TokenEvent(self.work.id, self.attempt, index, tokens, finish, self._cached or 0, error)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _lose_group(self, group: str, epoch: int, gone: bool, now: float) -> None:
        if self.current is None or self.current.grant.group != group or self.current.grant.epoch > epoch:
            return
        if gone:
            self._shun(self.current.grant)
        if gone and self.phase is Phase.RUNNING:
            self.deaths += 1
            self._retry(self.deaths > self._endurance.deaths, f"{self.deaths} groups died while they ran it", now)
        else:
            self._miss("its group was lost", now)

    def _miss(self, reason: str, now: float) -> None:
        """This attempt came to nothing, though no group died of it."""
        self.misses += 1
        self._retry(self.misses > self._endurance.misses, f"{self.misses} attempts came to nothing; {reason}", now)

    def _retry(self, enough: bool, reason: str, now: float) -> None:
        """Give the attempt up and ask for the next, unless it is `enough` or the client has all its tokens already."""
        was_running = self.phase is Phase.RUNNING
        self._finish_attempt(Finish.ABORT)
        finish = self.work.complete(self.output)
        if finish is not None:
            self._end(moves.End(self._event((), len(self.output), finish)))
        elif enough:
            self._fail_with(FAILED, f"The request was given up: {reason}.")
        else:
            self._troubled = True
            self.attempt += 1
            self._refusal = None
            if was_running:
                self._give_up = now + self._endurance.patience_s
            if self.misses > 1:
                self._rest(now)
            else:
                self._ask(now)

    def _shun(self, grant: Grant) -> None:
        self._avoid = (*self._avoid, (grant.group, grant.epoch))

    # -- time and endings ---------------------------------------------------------------------------------------------

    def _take_time(self, now: float) -> None:
        waiting = self.phase is not Phase.RUNNING
        if now >= self._deadline or (waiting and now >= self._give_up):
            refusal = self._refusal if waiting else None
            self._finish_attempt(Finish.ABORT)
            if refusal:
                self._fail(refusal)
            else:
                self._fail_with(TIMED_OUT, f"The request was not done after {now - self._arrived:.0f} s.")
        elif self.phase is Phase.RESTING and now >= self._rest_until:
            self._ask(now)

    def _set_alarm(self) -> None:
        at = _NEVER
        if self.phase is not Phase.ENDED:
            resting = self._rest_until if self.phase is Phase.RESTING else _NEVER
            at = min(self._deadline, resting, _NEVER if self.phase is Phase.RUNNING else self._give_up)
        wake = None if at == _NEVER else at
        if wake != self._wake:
            self._wake = wake
            self._actions.append(moves.Wake(wake))

    def _finish_attempt(self, finish: Finish) -> None:
        """Close the grant of this attempt, if it has one; what its group may still run is aborted."""
        current, self.current = self.current, None
        if current is None:
            return
        if finish is Finish.ABORT:
            self._actions.append(moves.Abort(current.grant))
            if self.phase is Phase.SUBMITTING:
                self._overtaken[self.attempt] = current.grant
        outcome = current.outcome(self.work, finish, len(self.output))
        self._close(moves.Settle(outcome), current.grant.id)

    def _close(self, action: moves.Settle | moves.Withdraw, grant: str) -> None:
        if grant not in self._closed:
            self._closed.add(grant)
            self._actions.append(action)

    def _fail_with(self, code: str, message: str) -> None:
        self._fail(Refusal(self.work.id, self.attempt, code, message))

    def _fail(self, refusal: Refusal) -> None:
        """A refusal while the client has seen nothing; otherwise a last event that says what happened."""
        if self.output:
            self._end(moves.End(self._event((), len(self.output), Finish.ERROR, refusal.message)))
        else:
            self._end(moves.End(refusal=refusal))

    def _end(self, end: moves.End) -> None:
        self.phase = Phase.ENDED
        self._actions.append(end)

    def _is_submitting(self, attempt: int) -> bool:
        return self.phase is Phase.SUBMITTING and attempt == self.attempt
