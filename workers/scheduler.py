"""Which sequence computes what in the next step: continuous batching, chunked prefill, admission, preemption.

schedule() -> StepPlan, apply(StepResult) -> events. Decides on blocks, slots and tokens alone: knows no tensor, no
rank, no client and no clock. A step may be scheduled while the one before it is still in flight; a token it needs from
there is PENDING in the plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.store import BlockTable, Copy, KVStore
from workers.plan import PENDING, Finish, Row, StepPlan, StepResult, TokenEvent
from workers.sequence import Priority, Request, Sequence
from workers.waiting import WaitingList

ADMISSION_WINDOW = 16
"""How far behind the head of the waiting list a step looks for a request that fits."""
MAX_BYPASSED = 32
"""How many later requests may pass one that finds no room."""
MAX_BLOCKED_S = 5.0
"""How many seconds later requests may pass one that finds no room."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold: sequences, tokens, and tokens of one prefill chunk."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk: int


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


@dataclass(frozen=True, slots=True)
class _Launched:
    """A sequence's part in a step in flight: its table then, the tokens in place afterwards, whether it samples."""

    sequence: Sequence
    table: BlockTable
    computed: int
    sampled: bool


@dataclass(slots=True)
class _Draft:
    """The plan under construction."""

    budget: int
    rows: list[Row]
    parts: list[_Launched]
    copy: list[Copy]
    planned: set[int]
    sampled: int = 0


class Scheduler:
    """`watermark` is the share of the pool that admission leaves free while something runs; `resume_growth` the tokens
    that a preempted sequence must find room for beyond its own length before it runs again."""

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
        self._watermark = int(store.total * watermark)
        self._resume_growth = resume_growth
        self._zero_per_step = zero_per_step
        self._live: dict[tuple[str, int], Sequence] = {}
        self._inflight: deque[tuple[int, list[_Launched]]] = deque()
        self._step = 0

    @property
    def step(self) -> int:
        """The last step planned."""
        return self._step

    @property
    def inflight(self) -> int:
        """Steps planned and not applied."""
        return len(self._inflight)

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
        draft = _Draft(self.limits.max_num_batched_tokens, [], [], [], set())
        self._plan_decodes(draft, now)
        self._plan_prefills(draft)
        self._admit(draft, now)
        step = self._step + 1
        zero = self.store.pool.wash(step, self._zero_per_step)
        if not draft.rows and not zero:
            return None
        return self._launch(StepPlan(step, tuple(draft.rows), tuple(draft.copy), zero), draft.parts)

    def keepalive(self) -> StepPlan:
        """An empty plan, to keep the ranks' collectives awake."""
        return self._launch(StepPlan(self._step + 1), [])

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

    def _apply_part(self, part: _Launched, token: int | None, now: float, events: list[TokenEvent]) -> None:
        sequence = part.sequence
        if token is not None:
            sequence.tokens.append(token)
            sequence.pending = 0
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
        if sequence.length >= sequence.request.longest:
            return Finish.LENGTH
        return None

    def _plan_decodes(self, draft: _Draft, now: float) -> None:
        self.running.sort(key=lambda sequence: sequence.rank)
        for sequence in tuple(self.running):
            if sequence.todo != 1 or sequence.table is None or not sequence.wants_more or not draft.budget:
                continue
            copies = self._grow(sequence, sequence.table, draft, now)
            if copies is not None:
                draft.copy.extend(copies)
                self._plan_row(draft, sequence, sequence.table, 1)

    def _grow(self, sequence: Sequence, table: BlockTable, draft: _Draft, now: float) -> tuple[Copy, ...] | None:
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

    def _choose_victim(self, needy: Sequence, draft: _Draft) -> Sequence | None:
        """The lowest class, then the cheapest recompute per block freed, then the latest; never one in the draft."""
        candidates = [
            s
            for s in self.running
            if s is not needy and id(s) not in draft.planned and s.request.priority >= needy.request.priority
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

    def _plan_prefills(self, draft: _Draft) -> None:
        for sequence in self.running:
            if sequence.todo > 1 and sequence.table is not None and draft.budget:
                self._plan_row(draft, sequence, sequence.table, sequence.todo)

    def _admit(self, draft: _Draft, now: float) -> None:
        blocked: list[Sequence] = []
        for sequence in self.waiting.first(ADMISSION_WINDOW):
            if not draft.budget:
                return
            if sequence.pending:
                continue  # preempted while its token is being sampled: known with the next result
            if self._make_room(sequence, draft, now) and self._open(sequence, now):
                self._run(sequence, draft)
                for passed in blocked:
                    passed.bypassed += 1
            elif self._holds_line(sequence, now):
                return
            else:
                blocked.append(sequence)

    def _run(self, sequence: Sequence, draft: _Draft) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.bypassed, sequence.blocked_at = 0, None
        if sequence.table is not None:
            self._plan_row(draft, sequence, sequence.table, sequence.todo)

    def _holds_line(self, sequence: Sequence, now: float) -> bool:
        """Whether a request that found no room has been passed often or long enough for all behind it to wait."""
        if sequence.blocked_at is None:
            sequence.blocked_at = now
        return sequence.bypassed >= MAX_BYPASSED or now - sequence.blocked_at >= MAX_BLOCKED_S

    def _make_room(self, sequence: Sequence, draft: _Draft, now: float) -> bool:
        """Whether a slot and blocks are there; an interactive request may take them from running batch work."""
        if self._fits(sequence, now):
            return True
        if sequence.request.priority is not Priority.INTERACTIVE:
            return False
        batch = [s for s in self.running if s.request.priority is Priority.BATCH and id(s) not in draft.planned]
        freed = sum(self.store.owned_blocks(s.table) for s in batch if s.table)
        if not batch or not self._fits(sequence, now, extra_blocks=freed, extra_slots=len(batch)):
            return False
        while batch and not self._fits(sequence, now):
            victim = max(batch, key=self._expendability)
            batch.remove(victim)
            self._preempt(victim, now)
        return self._fits(sequence, now)

    def _fits(self, sequence: Sequence, now: float, *, extra_blocks: int = 0, extra_slots: int = 0) -> bool:
        if len(self.running) >= self.limits.max_num_seqs + extra_slots:
            return False
        alone = not self.running
        match = self.store.match(sequence.request.namespace, sequence.tokens, sequence.keys, now)
        growth = min(self._resume_growth, sequence.request.longest - sequence.length) if sequence.preemptions else 0
        need = self.store.blocks_for(sequence.length + (0 if alone else growth))
        need += match.idle - match.blocks * self.store.groups
        return need + (0 if alone else self._watermark) <= self.store.available + extra_blocks

    def _open(self, sequence: Sequence, now: float) -> bool:
        """Adopt the cached prefix and reserve the whole prompt; False when the pool cannot give it in this step."""
        table = self.store.adopt(sequence.request.namespace, sequence.tokens, sequence.keys, now)
        if self.store.grow(table, table.cached, sequence.length, now) is None:
            self.store.release(table, now)
            return False
        sequence.table = table
        sequence.computed = table.cached
        if not sequence.preemptions:
            sequence.cached = min(table.cached, len(sequence.request.prompt))
            self.counters.prompt_tokens += len(sequence.request.prompt)
            self.counters.cached_tokens += sequence.cached
        return True

    def _plan_row(self, draft: _Draft, sequence: Sequence, table: BlockTable, wanted: int) -> None:
        count = min(wanted, draft.budget, self.limits.chunk if wanted > 1 else 1)
        start, stop = sequence.computed, sequence.computed + count
        draws = stop == sequence.length
        tokens = tuple(sequence.tokens[start:stop])
        source = None
        if stop > len(sequence.tokens):
            tokens, source = (*tokens, PENDING), sequence.source
        blocks = -(-stop // self.store.block_size)
        tables = tuple(tuple(group[:blocks]) for group in table.blocks)
        draw = sequence.request.sampling.draw(sequence.length) if draws else None
        draft.rows.append(Row(tokens, start, tables, draw, source))
        draft.parts.append(_Launched(sequence, table, stop, draws))
        draft.planned.add(id(sequence))
        draft.budget -= count
        self.counters.computed_tokens += count
        self.counters.recomputed_tokens += max(0, min(stop, sequence.reached) - start)
        sequence.computed = stop
        sequence.reached = max(sequence.reached, stop)
        if draws:
            sequence.source = draft.sampled
            draft.sampled += 1
            sequence.pending = 1

    def _launch(self, plan: StepPlan, parts: list[_Launched]) -> StepPlan:
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
