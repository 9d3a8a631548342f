"""Which sequence computes what in the next step: continuous batching, chunked prefill, admission, preemption.

schedule() -> StepPlan, apply(StepResult) -> events. Decides on blocks, slots and tokens alone: knows no tensor, no
rank, no client and no clock. A step may be scheduled while the one before it is still in flight; a token it needs from
there is PENDING in the plan.
"""

from __future__ import annotations

from collections import deque

from kvstore.store import Copy, KVStore
from kvstore.table import BlockTable
from workers.admission import Admission, obstacle
from workers.budget import Budget
from workers.draft import Draft
from workers.flight import Flight, Part
from workers.logprobs import Logprobs
from workers.plan import Finish, GroupDead, Limits, StepPlan, StepResult, TokenEvent
from workers.preemption import batch_victims, choose_victim, freed_blocks
from workers.sequence import Priority, Request, Sequence
from workers.tally import Counters, Doublings, StepTally
from workers.waiting import WaitingList

ADMISSION_WINDOW = 16
"""How far behind the head of the waiting list a step looks for a request that fits."""
TRIM_ZEROES = 8
"""How many times as many blocks a step zeroes while memory is scarce."""
LATE = "the deadline of the request passed while it waited for memory"
"""What a request is told that was never started, or never again."""


class Scheduler:
    """`watermark` and `resume_growth` as in Admission; `zero_per_step` bounds the housekeeping that a step carries."""

    def __init__(
        self,
        store: KVStore,
        limits: Limits,
        *,
        max_model_len: int,
        watermark: float = 0.05,
        resume_growth: int = 128,
        zero_per_step: int = 64,
    ) -> None:
        self.store = store
        self.limits = limits
        self.max_model_len = max_model_len
        self.counters = Counters()
        self.steps = StepTally()
        self.request_blocks = Doublings()
        self.running: list[Sequence] = []
        self.waiting = WaitingList()
        self._admission = Admission(store, watermark=watermark, resume_growth=resume_growth)
        self._zero_per_step = zero_per_step
        self._live: dict[tuple[str, int], Sequence] = {}
        self._budget = Budget()
        self._inflight: deque[Flight] = deque()
        self._step = 0

    @property
    def step(self) -> int:
        """The last step planned."""
        return self._step

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Sequences that have not ended."""
        return tuple(self._live.values())

    def obstacle(self, request: Request) -> str | None:
        """Why `request` can never run here, with the numbers; None when it can."""
        return obstacle(request, self.store, self.max_model_len)

    def add(self, request: Request, now: float) -> None:
        """A request that `obstacle` has nothing against joins the waiting list."""
        deadline = None if request.left is None else now + request.left
        sequence = Sequence(request, arrived=now, deadline=deadline)
        self._live[request.id, request.attempt] = sequence
        self.waiting.add(sequence)

    def abort(self, request: str, attempt: int, now: float, finish: Finish = Finish.ABORT) -> TokenEvent | None:
        """End a request at once; None when it has ended already."""
        sequence = self._live.get((request, attempt))
        if sequence is None:
            return None
        self._end(sequence, finish, now)
        return sequence.event(finish=finish)

    def end_late(self, now: float) -> list[TokenEvent]:
        """End what waits and is past its deadline: it is never prefilled (again)."""
        late = self.waiting.late(now)
        for sequence in late:
            self._end(sequence, Finish.ERROR, now)
        return [sequence.event(finish=Finish.ERROR, error=LATE) for sequence in late]

    def purge(self, namespace: bytes | None) -> int:
        """Nobody finds what was cached for `namespace` (None: for any) so far, and what its live requests compute is
        never cached; the number of blocks that were."""
        for sequence in self._live.values():
            if namespace is None or sequence.request.namespace == namespace:
                sequence.forgotten = True
        return self.store.purge(namespace)

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to do before another result or request comes in."""
        self.store.expire(now)
        self._make_way(now)
        limits = self.limits
        slots = max(limits.max_num_seqs, len(self.running))  # what runs goes on when limits get lower
        places, tokens = self._budget.allow(slots, limits.max_num_batched_tokens)
        step = self._step + 1
        draft = Draft(step, tokens, places, limits.chunk, self.store.block_size)
        self._plan_decodes(draft, now)
        self._plan_prefills(draft, now)
        self._admit(draft, now)
        zero = self.store.pool.wash(step, self._zero_per_step * (TRIM_ZEROES if limits.trim else 1))
        if not draft.rows and not zero:
            return None
        self.counters.computed_tokens += draft.computed
        self.counters.recomputed_tokens += draft.recomputed
        self._step = step
        self._inflight.append(Flight(step, draft.parts, draft.computed, draft.recomputed))
        self.store.pool.launch(step)
        return draft.finish(zero, self.counters.ooms)

    def apply(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in the result of the oldest step in flight: append, seal, finish; or take it back, if it was dropped.
        Raises GroupDead when a step as small as can be found no memory."""
        flight = self._inflight.popleft()
        assert flight.step == result.step, f"result of {result.step} while {flight.step} is the oldest in flight"
        self.store.pool.apply(flight.step)
        assert result.dropped or not (flight.undone and flight.parts), f"step {flight.step} built on a dropped one"
        if result.dropped:
            self._take_back(flight)
            if result.short:
                self._hold_back(flight)
            return []
        if flight.parts:
            self._budget.good(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
            self.steps.add(len(flight.parts), result.seconds, len(result.tokens), flight.computed)
        return [event for outcome in flight.outcomes(result) for event in self._apply_part(*outcome, now)]

    def _take_back(self, flight: Flight) -> None:
        """No rank computed a row of it, nor will one of the steps in flight, which build on it and come back dropped
        too. If it was itself such a step, that has been done, and what is in flight now was planned since."""
        for later in () if flight.undone else (*reversed(self._inflight), flight):
            later.undo()
            self.counters.computed_tokens -= later.computed
            self.counters.recomputed_tokens -= later.recomputed

    def _hold_back(self, flight: Flight) -> None:
        """A rank had no memory for it: smaller steps from now on."""
        self.counters.ooms += 1
        if (len(flight.parts), flight.computed) == (1, 1):
            raise GroupDead("a rank has no memory for a step with one token of one sequence")
        self._budget.short(len(flight.parts), flight.computed)

    def _apply_part(
        self, part: Part, token: int | None, logprobs: Logprobs | None, now: float
    ) -> tuple[TokenEvent, ...]:
        sequence = part.sequence
        if token is not None:
            sequence.tokens.append(token)
            sequence.pending -= 1
            self.counters.output_tokens += 1
        if part.holds:
            self.store.seal(part.table, sequence.tokens, part.computed, now)
            self.store.slide(part.table, part.computed, now)
        if token is not None:
            finish = sequence.end_after(token)
            prompt = sequence.hand_over_scores() if sequence.outputs == 1 else None
            event = sequence.event(token, finish=finish, logprobs=logprobs, prompt=prompt)
        elif not sequence.generates and part.holds and part.computed == sequence.length:
            finish = Finish.LENGTH
            event = sequence.event(finish=finish, prompt=sequence.hand_over_scores())
        else:
            return ()
        if finish is not None:
            self._end(sequence, finish, now)
        return (event,)

    def _make_way(self, now: float) -> None:
        """Preempt batch work for the first in line, if it is interactive and that gives it the room it lacks."""
        head = next(iter(self._candidates()), None)
        if head is None or head.pending or head.request.priority is not Priority.INTERACTIVE:
            return
        batch = batch_victims(self.store, self.running)
        if not batch or not self._would_start(head, now, slots=len(batch), blocks=freed_blocks(self.store, batch)):
            return
        while batch and not self._would_start(head, now):
            self._preempt(batch.pop(), now)

    def _would_start(self, sequence: Sequence, now: float, *, slots: int = 0, blocks: int = 0) -> bool:
        """Whether a slot and room are there, given `slots` and `blocks` more."""
        if len(self.running) - slots >= self.limits.max_num_seqs:
            return False
        return self._admission.fits(sequence, now, alone=len(self.running) <= slots, extra=blocks)

    def _plan_decodes(self, draft: Draft, now: float) -> None:
        self.running.sort(key=lambda sequence: sequence.rank)
        order = list(self.running)
        if len(order) > min(draft.budget, draft.places):  # not all fit: within a class they take turns
            order.sort(key=lambda sequence: (sequence.request.priority, sequence.stepped))
        for sequence in order:
            if sequence.todo != 1 or sequence.table is None or not sequence.wants_more or not draft.room:
                continue
            self._add(sequence, sequence.table, draft, now)

    def _add(self, sequence: Sequence, table: BlockTable, draft: Draft, now: float) -> None:
        """A row for `sequence`, if there is room for what it computes."""
        copies = self._grow(sequence, table, draft, now)
        if copies is not None:
            draft.copy.extend(copies)
            draft.add(sequence, table)

    def _grow(self, sequence: Sequence, table: BlockTable, draft: Draft, now: float) -> tuple[Copy, ...] | None:
        """Room for its next tokens, at the expense of others where it must be; None: not in this step."""
        start, stop = sequence.computed, draft.stop(sequence)
        while True:
            copies = self.store.grow(table, start, stop, now)
            if copies is not None:
                return copies
            if not self.store.shortage(table, start, stop):
                return None  # blocks that steps in flight still name will come back with their results
            victim = choose_victim(self.store, (s for s in self.running if s not in draft), sequence)
            self._preempt(victim or sequence, now)
            if victim is None:
                return None

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._release(sequence, now)
        sequence.computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(sequence)

    def _plan_prefills(self, draft: Draft, now: float) -> None:
        for sequence in list(self.running):
            if sequence.todo > 1 and sequence.table is not None and draft.room:
                self._add(sequence, sequence.table, draft, now)

    def _admit(self, draft: Draft, now: float) -> None:
        blocked: list[Sequence] = []
        for sequence in self._candidates():
            if not draft.room or len(self.running) >= self.limits.max_num_seqs:
                return
            if sequence.pending:
                continue  # preempted while its token is being sampled: known with the next result
            fits = self._admission.fits(sequence, now, alone=not self.running)
            table = self._admission.open(sequence, now, chunk=draft.longest) if fits else None
            if table is not None:
                self._start(sequence, table)
                draft.add(sequence, table)
                for passed in blocked:
                    passed.bypassed += 1
            elif self._admission.holds_line(sequence, now):
                return
            else:
                blocked.append(sequence)

    def _candidates(self) -> tuple[Sequence, ...]:
        """Who may start, in order. Without refill, what was preempted, and one of each tenant that has nothing here, as
        what they take was kept for them; if that is nobody and nothing runs, one that runs alone."""
        if not len(self.waiting):
            return ()
        busy = frozenset(sequence.request.terms.tenant for sequence in self.running)
        if self.limits.refill:
            return self.waiting.first(ADMISSION_WINDOW, busy)
        back = {id(s): s for s in (*self.waiting.preempted(ADMISSION_WINDOW), *self.waiting.guests(busy))}
        if back or busy:
            return tuple(sorted(back.values(), key=lambda sequence: sequence.rank))
        return self.waiting.first(1)

    def _start(self, sequence: Sequence, table: BlockTable) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.bypassed, sequence.blocked_at = 0, None
        sequence.table = table
        sequence.computed = table.cached
        if not sequence.preemptions:
            sequence.cached = min(table.cached, len(sequence.request.prompt))
            self.counters.prompt_tokens += len(sequence.request.prompt)
            self.counters.cached_tokens += sequence.cached
            expired, elsewhere = self.store.misses(table, sequence.findable[: len(sequence.request.prompt)])
            self.counters.expired_asked += expired
            self.counters.lost_to_scope += elsewhere

    def _end(self, sequence: Sequence, finish: Finish, now: float) -> None:
        sequence.finish = finish
        self.counters.finished += 1
        del self._live[sequence.request.id, sequence.request.attempt]
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self._release(sequence, now)
        if sequence.blocks:
            self.request_blocks.add(sequence.blocks)

    def _release(self, sequence: Sequence, now: float) -> None:
        assert sequence.table is not None
        sequence.blocks = max(sequence.blocks, sequence.table.held)
        self.store.release(sequence.table, now)
        sequence.table = None
        self.running.remove(sequence)
