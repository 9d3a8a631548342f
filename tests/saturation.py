"""A group that is always full, in virtual time: clients that ask again at once, the real coordinator with line, ladder
and news, and a real engine over shadow ranks whose steps take as long as a model's.

No network and no faults (`tests.simulation` has those): what is looked at here is who waits for how long, how full the
pool is, and what the ladder costs. The same seed gives the same run, on whatever machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.coordination.cards import GroupCard, Reply
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Outcome, Refusal, Share, Ticket
from cluster.coordination.terms import CoordinatorTerms
from kvstore.chain import derive_namespace
from kvstore.sessions import Terms
from tests.shadow_engine import ShadowEngine
from workers.plan import Finish, StepPlan, StepResult
from workers.sequence import Priority, Request, Sampling

INGRESS = "i"
HOP_S = 0.002
"""From an ingress to the coordinator or a group, and back."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step: for itself, for each one-token row, for each prompt token. (A model of 135 million parameters
    in bf16 on two cores, `deploy/NOTES.md`.)"""

    step: float = 0.008
    row: float = 0.0019
    token: float = 0.00055

    def of(self, plan: StepPlan) -> float:
        singles = sum(len(row.tokens) == 1 for row in plan.rows)
        return self.step + self.row * singles + self.token * (plan.tokens - singles)


@dataclass(eq=False)
class Client:
    """Asks, reads its answer to the end, waits `pause` seconds (from ask to ask where `steady`), asks again. Lengths of
    prompts and outputs are drawn from their ranges; with `open_end` it does not say how long the output will be."""

    share: Share
    priority: Priority = Priority.INTERACTIVE
    prompt: tuple[int, int] = (48, 144)
    output: tuple[int, int] = (64, 256)
    pause: float = 0.0
    steady: bool = False
    open_end: bool = False
    asked_at: float = 0.0
    waits: list[float] = field(default_factory=list)
    """Seconds to the first token, of every request so far."""


@dataclass(eq=False)
class _Job:
    client: Client
    ask: Ask
    output: int
    asked_at: float
    granted_at: float | None = None
    grant: Grant | None = None
    tokens: int = 0


class _Timed:
    """The shadow ranks, and the last plan that they ran."""

    def __init__(self, ranks: object) -> None:
        self._ranks = ranks
        self.plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> object:
        self.plan = plan
        return self._ranks.launch(plan)  # type: ignore[attr-defined]

    def wait(self, handle: object) -> StepResult:
        result: StepResult = self._ranks.wait(handle)  # type: ignore[attr-defined]
        return result


class Saturation:
    """One group of `blocks` blocks of 32 tokens with `slots` slots, and its `clients`. `run` goes on for some seconds;
    what happened stands in the clients, in `looks` (time, share held, level) and in `tokens`."""

    def __init__(
        self,
        clients: list[Client],
        *,
        blocks: int,
        slots: int = 64,
        step_tokens: int = 512,
        terms: CoordinatorTerms | None = None,
        pace: Pace = Pace(),
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.pace = pace
        self.chance = random.Random(seed)
        self.clients = clients
        self.coordinator = Coordinator(terms or CoordinatorTerms(), seed=seed)
        self.engine = ShadowEngine(
            name="g", epoch=0, blocks=blocks, block_size=32, max_num_seqs=slots, chunk=step_tokens, lease_s=1e9
        )
        self.ranks = self.engine._group = _Timed(self.engine._group)  # type: ignore[assignment]
        self.card = GroupCard("g", ("m",), "at-g", blocks, 32, slots, step_tokens, 32 * blocks)
        self.looks: list[tuple[float, float, str]] = []
        self.tokens: list[tuple[float, int]] = []
        self.jobs: dict[str, _Job] = {}
        self.refused: list[Refusal] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._serial = itertools.count()
        self._acked = 0
        self._reply = Reply(True, 0)
        self._stepping = False
        self.engine.enter(self.coordinator.join(self.card, 0.0))
        self._outbox = self.engine.subscribe(INGRESS, lambda: None, 0.0)
        self.after(0.0, self._report)
        self.after(0.25, self._tick)
        for client in clients:
            self.after(self.chance.uniform(0.0, max(0.2, client.pause)), lambda client=client: self._ask(client))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), event))

    def run(self, seconds: float) -> Saturation:
        until = self.now + seconds
        while self._heap[0][0] <= until:
            self.now, _, event = heapq.heappop(self._heap)
            event()
        self.now = until
        return self

    # -- figures ------------------------------------------------------------------------------------------------------

    def held(self, since: float) -> float:
        """The share of the pool that was held on average."""
        looks = [share for at, share, _ in self.looks if at >= since]
        return sum(looks) / len(looks)

    def rate(self, since: float) -> float:
        """Output tokens per second."""
        return sum(count for at, count in self.tokens if at >= since) / (self.now - since)

    @property
    def recomputed(self) -> float:
        """The share of computed tokens that had been computed before."""
        counters = self.engine._scheduler.counters
        return counters.recomputed_tokens / counters.computed_tokens

    @property
    def changes(self) -> int:
        """Moves of the ladder."""
        return self.coordinator._view.groups["g"].ladder.changes

    # -- what happens -------------------------------------------------------------------------------------------------

    def _ask(self, client: Client) -> None:
        client.asked_at = self.now
        name = f"r{next(self._serial)}"
        prompt, output = self.chance.randint(*client.prompt), self.chance.randint(*client.output)
        most = client.output[1] if client.open_end else output
        ask = Ask(name, 0, "m", b"n", prompt, most, priority=client.priority, share=client.share)
        self.jobs[name] = _Job(client, ask, output, self.now)
        self.after(HOP_S, lambda: self._place(name))

    def _place(self, name: str) -> None:
        (answer,) = self.coordinator.place(INGRESS, [self.jobs[name].ask], self.now)
        self._take(answer)
        self._hear()

    def _hear(self) -> None:
        if self.coordinator.wakes():
            news = self.coordinator.news(INGRESS, self._acked, self.now)
            self._acked = news.number
            for answer in news.answers:
                self._take(answer)

    def _take(self, answer: Grant | Ticket | Refusal) -> None:
        if isinstance(answer, Grant):
            self.jobs[answer.request].grant = answer
            self.jobs[answer.request].granted_at = self.now
            self.after(HOP_S, lambda: self._submit(answer))
        elif isinstance(answer, Refusal):
            self.refused.append(answer)
            client = self.jobs.pop(answer.request).client
            self.after(max(0.5, answer.retry_after or 0.0), lambda: self._ask(client))

    def _submit(self, grant: Grant) -> None:
        job = self.jobs[grant.request]
        ask, tenant = job.ask, job.ask.share.tenant
        prompt = tuple(self.chance.randrange(100) for _ in range(ask.prompt_tokens))
        request = Request(
            ask.request,
            prompt,
            Sampling(ask.max_tokens, stop_ids=frozenset()),
            derive_namespace(b"s", "request", ask.request),
            priority=ask.priority,
            grant=grant.id,
            granted_blocks=grant.blocks,
            terms=Terms(tenant.encode()),
        )
        self.engine.submit(INGRESS, request)
        self._poke()

    def _poke(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.after(0.0, self._step)

    def _step(self) -> None:
        self.ranks.plan = None
        busy = self.engine.turn(self.now)
        plan = self.ranks.plan
        seconds = self.pace.of(plan) if plan is not None and plan.rows else 0.0005
        self.after(seconds, lambda: self._deliver(busy))

    def _deliver(self, busy: bool) -> None:
        self._stepping = False
        count = 0
        while (message := self._outbox.read()) is not None:
            self.engine.ack(INGRESS, message.number)
            for event in message.events:
                count += len(event.tokens)
                self._progress(event.request, len(event.tokens), event.finish)
        self.tokens.append((self.now, count))
        if busy:
            self._poke()

    def _progress(self, name: str, tokens: int, finish: Finish | None) -> None:
        job = self.jobs.get(name)
        if job is None:
            return
        if not job.tokens and tokens:
            job.client.waits.append(self.now - job.asked_at)
        job.tokens += tokens
        if finish is None and job.tokens < job.output:
            return
        del self.jobs[name]
        if finish is None:  # the client has read enough: a stop string that only it knows
            self.engine.abort(name, 0)
        end = finish or Finish.ABORT
        self.after(HOP_S, lambda: self._settle(job, end))
        spent = self.now - job.client.asked_at if job.client.steady else 0.0
        self.after(max(0.0, job.client.pause - spent), lambda: self._ask(job.client))

    def _settle(self, job: _Job, finish: Finish) -> None:
        assert job.grant is not None
        satisfied = finish is Finish.ABORT
        outcome = Outcome(job.grant.id, finish, job.ask.prompt_tokens, 0, job.tokens, satisfied=satisfied)
        self.coordinator.settle([outcome], self.now)
        self._hear()

    def _report(self) -> None:
        self.engine.obey(self._reply.limits, self._reply.void)
        answer = self.engine.report()
        self._poke()
        self.after(0.0, lambda: self._send(answer))

    def _send(self, answer: object) -> None:
        if not answer.done():  # type: ignore[attr-defined]  # the step before is still under way
            self.after(0.005, lambda: self._send(answer))
            return
        report = answer.result()  # type: ignore[attr-defined]
        self._reply = self.coordinator.report(report, self.now)
        level = self.coordinator._view.groups["g"].ladder.level.label
        self.looks.append((self.now, report.pool.held / report.pool.total, level))
        self._hear()
        self.after(self._reply.beat_s, self._report)

    def _tick(self) -> None:
        self.coordinator.tick(self.now)
        self._hear()
        self.after(0.25, self._tick)
