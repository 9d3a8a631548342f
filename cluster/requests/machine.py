"""One request from ask to end: a pure state machine, on_event(event, now) -> actions.

Fences late answers by attempt and late tokens by attempt and epoch; replays what a dead group had under way, as a new
attempt that carries the output already sent; ends exactly once, and closes every grant it was given exactly once. After
its end it still takes in what is late, to give it back. Knows no asyncio, no Ray and no clock.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.coordination.grants import Grant, Refusal, Ticket
from cluster.requests import moves, verdicts
from cluster.requests.account import Account
from cluster.requests.history import History, Transcript
from cluster.requests.patience import Patience
from cluster.requests.verdicts import FAILED, POISONED, TIMED_OUT, Verdict
from cluster.requests.work import Attempt, Endurance, Phase, Work
from workers.plan import Finish, TokenEvent

_WAITING = (Phase.ASKING, Phase.RESTING, Phase.QUEUED)


class RequestMachine:
    """`history` is what it has been through, `transcript` what the client has been sent; `fault` the code that it
    failed with; `satisfied`: the client had all it wanted before its group was done."""

    def __init__(self, work: Work, endurance: Endurance) -> None:
        self.work = work
        self.phase = Phase.NEW
        self.history = History(work, endurance)
        self.transcript = Transcript(work.id)
        self.fault: str | None = None
        self.satisfied = False
        self._patience = Patience(work, endurance)
        self._account = Account(work)
        self._in_line = False
        self._ahead = 0
        self._actions: list[moves.Action] = []

    @property
    def output(self) -> list[int]:
        """The tokens that the client has been sent."""
        return self.transcript.output

    @property
    def current(self) -> Attempt | None:
        """The attempt that counts, while it holds a grant."""
        return self._account.current

    @property
    def ahead(self) -> int | None:
        """How many stood before it in the line when last told; None while it does not stand there."""
        return self._ahead if self.phase is Phase.QUEUED else None

    def on_event(self, event: moves.Event, now: float) -> tuple[moves.Action, ...]:
        """What to do now that `event` has happened, in this order."""
        match event:
            case moves.Arrived(epoch, news):
                self._take_news(epoch, news, now)
            case moves.Placed(answer):
                self._take_answer(answer, now)
            case moves.Submitted(attempt):
                self._take_acceptance(attempt)
            case moves.Ticked() if self.phase not in (Phase.NEW, Phase.ENDED):
                self._patience.spend_wake()
                self._take_time(now)
            case moves.Started() if self.phase is Phase.NEW:
                self._patience.start(now)
                self._ask(now)
            case moves.Cancelled() if self.phase is not Phase.ENDED:
                self._give_back()
                self._end(moves.End())
            case moves.Satisfied() if self.phase is not Phase.ENDED:
                self.satisfied = True
                self._give_back()
                self._end(moves.End())
            case moves.AskLost(attempt) if self.phase is Phase.ASKING and attempt == self.history.attempt:
                self.history.troubled = True
                self._rest(now)
            case moves.LineLost() if self.phase in (Phase.ASKING, Phase.QUEUED):
                self._leave_line(now)
                self.history.troubled = True
                self._ask(now)
            case moves.Rejected(attempt, code, message) if self._is_submitting(attempt):
                self._take_rejection(code, message, now)
            case moves.SubmitLost(attempt) if self._is_submitting(attempt):
                self._miss("the group did not answer", now)
            case moves.GroupLost(group, epoch, gone):
                self._lose_group(group, epoch, gone, now)
            case _:
                pass  # late: about an attempt or a state that is over
        self._actions += self._patience.wake(self.phase)
        actions, self._actions = tuple(self._actions), []
        return actions

    # -- waiting for a place ------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Ask, or ask again: a coordinator that knows the attempt already says the same."""
        if self.phase is not Phase.QUEUED:
            self.phase = Phase.ASKING
        self._in_line = True
        ask = self.history.ask(len(self.output), age=self._patience.age(now), left=self._patience.left(now))
        self._actions.append(moves.Place(ask))

    def _rest(self, now: float) -> None:
        self.phase = Phase.RESTING
        self._patience.rest(now, self.history.refusal)

    def _take_answer(self, answer: Grant | Ticket | Refusal, now: float) -> None:
        waits = self.phase in _WAITING and answer.attempt == self.history.attempt
        goes_without = self.current is not None and not self.current.grant.id
        match answer:
            case Grant() if waits and self._account.is_open(answer):
                self._submit(answer, now)
            case Grant():
                self._actions += self._account.refuse(answer)
            case Ticket() if waits:
                self.phase, self._ahead = Phase.QUEUED, answer.ahead
                self._in_line = True
                self._patience.queue(now)
            case Ticket() if self.phase is Phase.ENDED or goes_without:  # it waits no more
                self._actions.append(moves.Leave(answer.request, answer.attempt))
            case Refusal() if waits:
                self._take_refusal(answer, now)

    def _submit(self, grant: Grant, now: float) -> None:
        if not grant.id:  # of its own: the coordinator may still have the request in its line
            self._give_up_place()
        self._leave_line(now)
        self.phase = Phase.SUBMITTING
        self.history.admitted |= bool(grant.id)
        attempt = self._account.take(grant, self.output)
        request = attempt.request(self.work, self._patience.left(now))
        self._actions.append(moves.Submit(grant, request))

    def _take_refusal(self, refusal: Refusal, now: float) -> None:
        self._leave_line(now)
        self.history.refusal = refusal
        match verdicts.weigh_refusal(refusal.code, self.history, fresh=self._patience.is_fresh(now)):
            case Verdict.LATE:
                self._time_out(now)
            case Verdict.MISS:
                self._miss("the coordinator has moved on", now)
            case Verdict.REST:
                self._rest(now)
            case _:
                self._fail(refusal)

    def _leave_line(self, now: float) -> None:
        """By an answer, or because there is no line any more. Time spent there was no waiting in vain."""
        self._in_line = False
        if self.phase is Phase.QUEUED:
            self.phase = Phase.ASKING
            self._patience.restart(now, replay=self.history.admitted)

    def _take_rejection(self, code: str, message: str, now: float) -> None:
        current = self.current
        assert current is not None
        verdict = verdicts.weigh_rejection(code, promised=bool(current.grant.id))
        if verdict is Verdict.ACCEPTED:
            self._run()
            return
        self._actions += self._account.refuse(self._account.give_back())
        match verdict:
            case Verdict.NEXT:
                self.history.begin_attempt()
                self._ask(now)
            case Verdict.MISS | Verdict.SHUN:
                if verdict is Verdict.SHUN:
                    self.history.shun(current.incarnation)
                self._miss(message, now)
            case _:
                self._fail_with(verdicts.rejection_code(code), message)

    def _take_acceptance(self, attempt: int) -> None:
        if self._is_submitting(attempt):
            self._run()
        else:
            self._actions += self._account.abort_again(attempt)

    # -- running ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.phase is Phase.SUBMITTING:
            self.phase = Phase.RUNNING
            self.history.accepted += 1
            self.history.admitted = True

    def _take_news(self, epoch: int, news: TokenEvent, now: float) -> None:
        current = self.current
        if current is None or news.attempt != self.history.attempt or epoch < current.epoch:
            return
        fresh = self.transcript.add(news)
        if fresh is None:
            self._miss("output got lost on the way", now)
            return
        self._run()
        current.epoch, current.cached = epoch, news.cached
        late = news.finish is Finish.ERROR and self._patience.is_late(now)
        if news.finish not in (None, Finish.ABORT) and not late:
            self.fault = FAILED if news.finish is Finish.ERROR else None
            self._finish_attempt(news.finish)
            self._end(moves.End(replace(fresh, finish=news.finish, error=news.error)))
            return
        if fresh.tokens:
            self._actions.append(moves.Emit(fresh))
        if late:
            self._time_out(now)  # the group saw the deadline pass before we did
        elif news.finish is Finish.ABORT:
            self._miss("its group ended it unasked", now)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _lose_group(self, group: str, epoch: int, gone: bool, now: float) -> None:
        if self.current is None or self.current.grant.group != group or self.current.grant.epoch > epoch:
            return
        if gone:
            self.history.shun(self.current.incarnation)
        if not gone or self.phase is not Phase.RUNNING:
            self._miss("its group was lost", now)
            return
        poisonous = self.history.alone
        self.history.deaths += 1
        reason = f"{self.history.deaths} groups died while they ran it, the last while it ran there alone"
        self._retry(POISONED if poisonous else None, reason, now)

    def _miss(self, reason: str, now: float) -> None:
        """This attempt came to nothing, though no group died of it."""
        self.history.misses += 1
        end = FAILED if self.history.exhausted else None
        self._retry(end, f"{self.history.misses} attempts came to nothing; {reason}", now)

    def _retry(self, end: str | None, reason: str, now: float) -> None:
        """Give the attempt up and ask for the next, unless it must end (with that code) or the client has it all."""
        was_running = self.phase is Phase.RUNNING
        self._finish_attempt(Finish.ABORT)
        finish = self.work.complete(self.output)
        if finish is not None:
            self._say_last(finish)
        elif end is not None:
            self._fail_with(end, f"The request was given up: {reason}.")
        else:
            self.history.troubled = True
            self.history.begin_attempt()
            if was_running:
                self._patience.restart(now, replay=True)
            if self.history.misses > 1:
                self._rest(now)
            else:
                self._ask(now)

    # -- time and endings ---------------------------------------------------------------------------------------------

    def _take_time(self, now: float) -> None:
        if self._patience.is_late(now):
            self._time_out(now)
        elif self._patience.is_out(self.phase, now):
            self._time_out(now, verdicts.tellable(self.history))
        elif self._patience.is_due(self.phase, now):
            if self.phase is Phase.QUEUED:
                self._patience.queue(now)
            self._ask(now)

    def _time_out(self, now: float, refusal: Refusal | None = None) -> None:
        """End it with `refusal`, or with a word about the time."""
        self._give_back()
        message = f"The request was not done after {self._patience.age(now):.0f} s."
        self._fail(refusal or Refusal(self.work.id, self.history.attempt, TIMED_OUT, message))

    def _give_back(self) -> None:
        """The place in the line, or the grant."""
        self._give_up_place()
        self._finish_attempt(Finish.ABORT)

    def _give_up_place(self) -> None:
        if self._in_line:
            self._in_line = False
            self._actions.append(moves.Leave(self.work.id, self.history.attempt))

    def _finish_attempt(self, finish: Finish) -> None:
        submitting = self.phase is Phase.SUBMITTING
        sent = len(self.output)
        self._actions += self._account.finish(finish, sent, submitting=submitting, satisfied=self.satisfied)

    def _fail_with(self, code: str, message: str) -> None:
        self._fail(Refusal(self.work.id, self.history.attempt, code, message))

    def _fail(self, refusal: Refusal) -> None:
        """A refusal while the client has seen nothing; otherwise a last event that says what happened."""
        self.fault = refusal.code
        if self.output:
            self._say_last(Finish.ERROR, refusal.message)
        else:
            self._end(moves.End(refusal=refusal))

    def _say_last(self, finish: Finish, error: str | None = None) -> None:
        self._end(moves.End(self.transcript.event(self.history.attempt, (), finish, error)))

    def _end(self, end: moves.End) -> None:
        self.phase = Phase.ENDED
        self._actions.append(end)

    def _is_submitting(self, attempt: int) -> bool:
        return self.phase is Phase.SUBMITTING and attempt == self.history.attempt
