"""Which sequence computes what in the next step: continuous batching, chunked prefill, admission, preemption.

schedule() -> StepPlan, apply(StepResult) -> events. Decides on blocks, slots and tokens alone: knows no tensor, no
rank, no client and no clock. A step may be scheduled while the one before it is still in flight; a token it needs from
there is PENDING in the plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.store import BlockTable, Copy, KVStore
from workers.admission import Admission
from workers.draft import Draft, Part
from workers.plan import Finish, Limits, StepPlan, StepResult, TokenEvent
from workers.sequence import Priority, Request, Sequence
from workers.waiting import WaitingList

ADMISSION_WINDOW = 16
"""How far behind the head of the waiting list a step looks for a request that fits."""


@dataclass(slots=True)
class Counters:
    """Totals since the group came up."""

    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0


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
        self.running: list[Sequence] = []
        self.waiting = WaitingList()
        self._admission = Admission(store, watermark=watermark, resume_growth=resume_growth)
        self._zero_per_step = zero_per_step
        self._live: dict[tuple[str, int], Sequence] = {}
        self._inflight: deque[tuple[int, list[Part]]] = deque()
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
        if request.longest > self.max_model_len:
            return (
                f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} exceed "
                f"the context of {self.max_model_len} tokens"
            )
        need, have = self.store.blocks_for(request.longest), self.store.total
        if need > have:
            return (
                f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens} need {need} blocks "
                f"of {self.store.block_size} tokens, and the whole pool has {have}"
            )
        return None

    def add(self, request: Request, now: float) -> None:
        """A request that `obstacle` has nothing against joins the waiting list."""
        sequence = Sequence(request, arrived=now - request.age)
        self._live[request.id, request.attempt] = sequence
        self.waiting.add(sequence)

    def abort(self, request: str, attempt: int, now: float, finish: Finish = Finish.ABORT) -> TokenEvent | None:
        """End a request at once; None when it has ended already."""
        sequence = self._live.get((request, attempt))
        if sequence is None:
            return None
        self._end(sequence, finish, now)
        return TokenEvent(request, attempt, sequence.outputs, (), finish, sequence.cached)

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to do before another result or request comes in."""
        self.store.expire(now)
        self._make_way(now)
        draft = Draft(self.limits, self.store.block_size)
        self._plan_decodes(draft, now)
        self._plan_prefills(draft)
        self._admit(draft, now)
        step = self._step + 1
        zero = self.store.pool.wash(step, self._zero_per_step)
        if not draft.rows and not zero:
            return None
        self.counters.computed_tokens += draft.computed
        self.counters.recomputed_tokens += draft.recomputed
        return self._launch(draft.finish(step, zero), draft.parts)

    def apply(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in the result of the oldest step in flight: append, seal, finish."""
        step, parts = self._inflight.popleft()
        assert step == result.step, f"result of step {result.step} while {step} is the oldest in flight"
        self.store.pool.apply(step)
        events: list[TokenEvent] = []
        tokens = iter(result.tokens)
        for part in parts:
            token = next(tokens) if part.sampled else None
            if part.sequence.finish is None:
                self._apply_part(part, token, now, events)
        return events

    def _apply_part(self, part: Part, token: int | None, now: float, events: list[TokenEvent]) -> None:
        sequence = part.sequence
        if token is not None:
            sequence.tokens.append(token)
            sequence.pending -= 1
            self.counters.output_tokens += 1
        if sequence.table is part.table:
            self.store.seal(part.table, sequence.tokens, part.computed, now)
        if token is None:
            return
        finish = self._finish_of(sequence, token)
        request = sequence.request
        events.append(TokenEvent(request.id, request.attempt, sequence.outputs - 1, (token,), finish, sequence.cached))
        if finish is not None:
            self._end(sequence, finish, now)

    def _finish_of(self, sequence: Sequence, token: int) -> Finish | None:
        if token in sequence.request.sampling.stop_ids:
            return Finish.STOP
        if len(sequence.tokens) >= sequence.request.longest:
            return Finish.LENGTH
        return None

    def _make_way(self, now: float) -> None:
        """Preempt batch work for the first in line, if it is interactive and that gives it the room it lacks."""
        head = next(iter(self.waiting.first(1)), None)
        if head is None or head.pending or head.request.priority is not Priority.INTERACTIVE:
            return
        batch = [s for s in self.running if s.request.priority is Priority.BATCH]
        freed = sum(self.store.owned_blocks(s.table) for s in batch if s.table)
        if not batch or not self._would_start(head, now, slots=len(batch), blocks=freed):
            return
        batch.sort(key=self._expendability)
        while batch and not self._would_start(head, now):
            self._preempt(batch.pop(), now)

    def _would_start(self, sequence: Sequence, now: float, *, slots: int = 0, blocks: int = 0) -> bool:
        """Whether a slot and room are there, given `slots` and `blocks` more."""
        if len(self.running) - slots >= self.limits.max_num_seqs:
            return False
        return self._admission.fits(sequence, now, alone=len(self.running) <= slots, extra=blocks)

    def _plan_decodes(self, draft: Draft, now: float) -> None:
        self.running.sort(key=lambda sequence: sequence.rank)
        for sequence in tuple(self.running):
            if sequence.todo != 1 or sequence.table is None or not sequence.wants_more or not draft.budget:
                continue
            copies = self._grow(sequence, sequence.table, draft, now)
            if copies is not None:
                draft.copy.extend(copies)
                draft.add(sequence, sequence.table)

    def _grow(self, sequence: Sequence, table: BlockTable, draft: Draft, now: float) -> tuple[Copy, ...] | None:
        """Room for one more token, at the expense of others where it must be; None: not in this step."""
        while True:
            copies = self.store.grow(table, sequence.computed, sequence.computed + 1, now)
            if copies is not None:
                return copies
            if not self.store.shortage(table, sequence.computed, sequence.computed + 1):
                return None  # blocks that steps in flight still name will come back with their results
            victim = self._choose_victim(sequence, draft)
            self._preempt(victim or sequence, now)
            if victim is None:
                return None

    def _choose_victim(self, needy: Sequence, draft: Draft) -> Sequence | None:
        """The lowest class, then the cheapest recompute per block freed, then the latest; never one in the draft."""
        candidates = [
            s
            for s in self.running
            if s is not needy and s not in draft and s.request.priority >= needy.request.priority
        ]
        return max(candidates, key=self._expendability, default=None)

    def _expendability(self, sequence: Sequence) -> tuple[int, float, float]:
        freed = self.store.owned_blocks(sequence.table) if sequence.table else 0
        cost = sequence.computed / freed if freed else float("inf")
        return (sequence.request.priority, -cost, sequence.arrived)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        assert sequence.table is not None
        self.store.release(sequence.table, now)
        sequence.table = None
        sequence.computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.running.remove(sequence)
        self.waiting.add(sequence)

    def _plan_prefills(self, draft: Draft) -> None:
        for sequence in self.running:
            if sequence.todo > 1 and sequence.table is not None and draft.budget:
                draft.add(sequence, sequence.table)

    def _admit(self, draft: Draft, now: float) -> None:
        blocked: list[Sequence] = []
        for sequence in self.waiting.first(ADMISSION_WINDOW):
            if not draft.budget or len(self.running) >= self.limits.max_num_seqs:
                return
            if sequence.pending:
                continue  # preempted while its token is being sampled: known with the next result
            fits = self._admission.fits(sequence, now, alone=not self.running)
            table = self._admission.open(sequence, now) if fits else None
            if table is not None:
                self._start(sequence, table)
                draft.add(sequence, table)
                for passed in blocked:
                    passed.bypassed += 1
            elif self._admission.holds_line(sequence, now):
                return
            else:
                blocked.append(sequence)

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

    def _launch(self, plan: StepPlan, parts: list[Part]) -> StepPlan:
        self._step = plan.step
        self._inflight.append((plan.step, parts))
        self.store.pool.launch(plan.step)
        return plan

    def _end(self, sequence: Sequence, finish: Finish, now: float) -> None:
        sequence.finish = finish
        self.counters.finished += 1
        del self._live[sequence.request.id, sequence.request.attempt]
        if sequence.table is None:
            self.waiting.remove(sequence)
            return
        self.store.release(sequence.table, now)
        sequence.table = None
        self.running.remove(sequence)
