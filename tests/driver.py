"""A seeded driver: random requests, aborts, silences, sessions, purges, quotas, deadlines, limits and steps without
memory against one engine over shadow ranks; invariants after every turn, the oracle at the end. One seed is one run; a
failure names it."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.sessions import Terms
from kvstore.store import KVStore
from tests.shadow import ShadowGroup, expected_logprobs, expected_output
from workers.engine import Engine
from workers.errors import EngineRefused
from workers.logprobs import TokenLogprobs
from workers.outbox import Outbox
from workers.plan import Finish, Limits, Penalties, StepPlan, TokenEvent
from workers.scheduler import Scheduler
from workers.sequence import Priority, Request, Sampling

INGRESS = "ingress"
PUBLIC = b"public"
NAMESPACES = {b"a": b"t", b"b": b"t", b"c": b"u", b"d": b""}
"""Whose namespace it is: the tenant."""
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None, None), (None, 5), (None, 11, 11), (7,), (20, 3)]
WINDOWS += [(None, 1, 1), (6, 1, 1)]
"""Of the layer groups; those of one token are of open blocks."""

REPEATED = Penalties(repetition=2.0, min_tokens=4)


@dataclass(frozen=True)
class Setup:
    """What a seed decides about the engine."""

    blocks: int
    block_size: int
    windows: tuple[int | None, ...]
    depth: int
    max_num_seqs: int
    budget: int
    chunk: int
    ttl: float
    prefix_cache: bool
    watermark: float
    short: float = 0.0
    purges: float = 0.0
    limits: float = 0.0
    keeps: bool = False
    quotas: bool = False
    publics: bool = False
    late: bool = False

    @classmethod
    def of(cls, rng: random.Random) -> Setup:
        return cls(
            blocks=rng.choice([12, 24, 40, 120]),
            block_size=rng.choice([1, 4, 8]),
            windows=rng.choice(
                [(None,), (None,), (None, None), (None, 5), (None, 11, 11), (7,), (20, 3), (None, 1, 1), (6, 1, 1)]
            ),
            depth=rng.choice([1, 2]),
            max_num_seqs=rng.choice([1, 3, 8, 32]),
            budget=rng.choice([4, 16, 64]),
            chunk=rng.choice([3, 16, 64]),
            ttl=rng.choice([0.5, 5.0, 1e9]),
            prefix_cache=rng.random() < 0.85,
            watermark=rng.choice([0.0, 0.05, 0.2]),
            short=rng.choice([0.0, 0.0, 0.05, 0.3]),
            purges=rng.choice([0.0, 0.0, 0.05]),
            limits=rng.choice([0.0, 0.0, 0.1]),
            keeps=rng.random() < 0.4,
            quotas=rng.random() < 0.4,
            publics=rng.random() < 0.5,
            late=rng.random() < 0.4,
        )


@dataclass
class Driver:
    """Runs one seed. `turns` counts engine turns; `outputs` and `finishes` map a request to its tokens and reason,
    `told` and `scores` to the log-probabilities of its output and of its prompt;
    `emptied` are namespaces that were purged and got no request since."""

    seed: int
    requests: int = 30
    setup: Setup | None = None
    now: float = 0.0
    turns: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    told: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str | None] = field(default_factory=dict)
    sent: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    cached: int = 0
    purged: int = 0
    emptied: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.setup = s = self.setup or Setup.of(self.rng)
        self.store = KVStore(
            s.blocks,
            s.block_size,
            windows=s.windows,
            ahead=s.depth * min(s.budget, s.chunk),
            ttl=s.ttl,
            prefix_cache=s.prefix_cache,
        )
        self.own = Limits(s.max_num_seqs, s.budget, s.chunk)
        self.longest = min(60, self.store.extent.longest_for(s.blocks))
        self.scheduler = Scheduler(
            self.store, self.own, max_model_len=self.longest, watermark=s.watermark, resume_growth=8, zero_per_step=3
        )
        self.accidents = random.Random(self.seed + 1)
        self.curiosity = random.Random(self.seed + 2)
        self.group = ShadowGroup(s.blocks, s.block_size, windows=s.windows, short=self.is_short)
        self.engine = Engine(self.scheduler, self.group, name="g", epoch=1, depth=s.depth, lease_s=1e12, audit_s=2.0)
        self.outbox: Outbox = self.engine.subscribe(INGRESS, lambda: None, self.now)
        self.bases = [tuple(self.rng.randrange(97) for _ in range(40)) for _ in range(3)]
        self.waiting: list[tuple[bytes, Future[int]]] = []

    def is_short(self, plan: StepPlan) -> bool:
        assert self.setup is not None
        return (len(plan.rows), plan.tokens) != (1, 1) and self.accidents.random() < self.setup.short

    def run(self) -> Driver:
        while len(self.sent) < self.requests or not self.engine.idle:
            self.act()
            self.turn()
            assert self.turns < 400 * self.requests, f"seed {self.seed}: no end in sight"
        self.settle()
        return self

    def act(self) -> None:
        assert self.setup is not None
        self.now += self.rng.choice([0.0, 0.01, 0.01, 0.3])
        if len(self.sent) < self.requests and self.rng.random() < 0.5:
            self.submit()
        live = [name for name in self.sent if name not in self.finishes and name not in self.aborted]
        if live and self.rng.random() < 0.05:
            name = self.rng.choice(live)
            self.aborted.add(name)
            self.engine.abort(name, 0)
        if self.rng.random() < self.setup.purges:
            name = self.rng.choice([*NAMESPACES, PUBLIC])
            self.waiting.append((name, self.engine.purge(name)))
        if self.rng.random() < self.setup.limits:
            self.engine.obey(self.some_limits(), ())

    def some_limits(self) -> Limits:
        rng, own = self.rng, self.own
        seqs, tokens = rng.randint(1, own.max_num_seqs), rng.randint(1, own.max_num_batched_tokens)
        return Limits(seqs, tokens, rng.randint(1, own.chunk), refill=rng.random() < 0.6, trim=rng.random() < 0.3)

    def submit(self) -> None:
        assert self.setup is not None
        rng = self.rng
        prompt = self.some_prompt()
        length = len(prompt)
        sampling = Sampling(
            max_tokens=rng.choice([0, *(rng.randint(1, min(20, self.longest - length)) for _ in range(9))]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            stop_ids=frozenset(rng.sample(range(97), rng.choice([0, 0, 2]))),
            logprobs=self.curiosity.choice([None, None, 0, 2]),
            prompt_logprobs=self.curiosity.choice([None, None, None, 0, 3]),
            penalties=self.curiosity.choice([None, None, Penalties(presence=1.0), REPEATED]),
        )
        namespace = rng.choice(list(NAMESPACES))
        name = f"r{len(self.sent)}"
        request = Request(
            name,
            prompt,
            sampling,
            namespace,
            priority=rng.choice([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH]),
            grant=f"grant-{name}",
            granted_blocks=rng.choice([0, 1, self.store.blocks_for(length + sampling.max_tokens)]),
            left=rng.choice([None, 0.0, 0.2, 3.0]) if self.setup.late else None,
            terms=self.some_terms(namespace, prompt),
        )
        self.sent[request.id] = request
        self.emptied.discard(namespace)
        try:
            self.engine.submit(INGRESS, request)
        except EngineRefused as refusal:  # the driver only sends what fits
            raise AssertionError(f"seed {self.seed}: {refusal}") from refusal

    def some_prompt(self) -> tuple[int, ...]:
        rng = self.rng
        length = rng.randint(1, self.longest - 1)
        base = rng.choice(self.bases)[: rng.randint(0, length)]
        if self.sent and rng.random() < 0.2:
            size = self.store.block_size
            earlier = rng.choice(list(self.sent.values())).prompt
            return earlier[: max(len(earlier) // size * size, 1)]
        return (base + tuple(rng.randrange(97) for _ in range(length)))[:length]

    def some_terms(self, namespace: bytes, prompt: tuple[int, ...]) -> Terms:
        """The first base is a registered prompt."""
        assert self.setup is not None
        rng, setup = self.rng, self.setup
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.bases[0], strict=False)) if a != b), None)
        shared = min(len(prompt), len(self.bases[0])) if same is None else same
        return Terms(
            tenant=NAMESPACES[namespace],
            session_blocks=rng.choice([None, 0, 2, 6]) if setup.quotas else None,
            tenant_blocks=rng.choice([None, 3, 9]) if setup.quotas else None,
            keep_s=rng.choice([0.0, 1.0, 20.0]) if setup.keeps else 0.0,
            public=PUBLIC if setup.publics else b"",
            public_tokens=shared if setup.publics else 0,
        )

    def turn(self) -> None:
        self.turns += 1
        self.engine.turn(self.now)
        self.store.check()
        assert not self.group.named() & set(self.store.pool.ready_blocks()), "a block in flight is in circulation"
        for name, answer in self.waiting:
            self.purged += answer.result(timeout=0)
            if name != PUBLIC:
                self.emptied.add(name)
        self.waiting.clear()
        for name in self.emptied:
            assert not self.store.sessions.blocks(name), f"seed {self.seed}: a request outlived the purge of {name!r}"
        message = self.outbox.read()
        for event in message.events if message else ():
            self.take(event)
        if message and self.rng.random() < 0.7:
            self.engine.ack(INGRESS, message.number)

    def take(self, event: TokenEvent) -> None:
        output = self.outputs.setdefault(event.request, [])
        assert event.request not in self.finishes, f"seed {self.seed}: news after the end of {event.request}"
        assert event.index == len(output), f"seed {self.seed}: a gap in {event.request}"
        output.extend(event.tokens)
        self.told.setdefault(event.request, []).extend(event.logprobs or ())
        if event.prompt is not None:
            assert event.request not in self.scores, f"seed {self.seed}: {event.request} is scored twice"
            self.scores[event.request] = list(event.prompt)
        if event.finish is not None:
            self.finishes[event.request] = event.finish
            self.errors[event.request] = event.error
            self.cached += event.cached

    def settle(self) -> None:
        """After the last request: every request ended once and rightly, and every block came back."""
        for _ in range(4):
            self.turn()
        for name, request in self.sent.items():
            self.check_end(name, request)
        pool, setup = self.store.pool, self.setup
        assert setup is not None
        assert pool.held == 0 and self.store.tables == 0, f"seed {self.seed}: {pool.held} blocks still held"
        assert pool.free + pool.idle + pool.dirty == pool.total
        assert self.store.leaked == 0, f"seed {self.seed}: the audit found what is not there"
        assert self.scheduler.counters.ooms == self.group.drops
        report = self.engine.report()
        self.turn()
        assert report.result(timeout=0).committed == 0

    def check_end(self, name: str, request: Request) -> None:
        sampling = request.sampling
        most, draw, stops = sampling.max_tokens, sampling.draw(0), sampling.stop_ids
        want = expected_output(request.prompt, most, draw, self.group.vocabulary, stops, sampling.penalties)
        got, finish = self.outputs.get(name, []), self.finishes[name]
        self.check_logprobs(name, request, got, ended=finish in (Finish.STOP, Finish.LENGTH))
        if finish is Finish.ABORT:
            assert name in self.aborted and got == want[: len(got)], f"seed {self.seed}: {name}"
        elif finish is Finish.ERROR:
            assert request.left is not None and "deadline" in (self.errors[name] or ""), f"seed {self.seed}: {name}"
            assert got == want[: len(got)], f"seed {self.seed}: {name}"
        else:
            assert got == want, f"seed {self.seed}: {name} got {got}, not {want}"
            stopped = bool(got) and got[-1] in sampling.stop_ids
            assert finish is (Finish.STOP if stopped else Finish.LENGTH), f"seed {self.seed}: {name} {finish}"

    def check_logprobs(self, name: str, request: Request, output: list[int], *, ended: bool) -> None:
        prompt, sampling = request.prompt, request.sampling
        told, scores = self.told.get(name, []), self.scores.get(name)
        if sampling.logprobs is None:
            assert not told, f"seed {self.seed}: {name} did not ask"
        else:
            want = expected_logprobs((*prompt, *output), sampling.logprobs)[len(prompt) - 1 :]
            assert told == want, f"seed {self.seed}: {name} was told {told}, not {want}"
        if sampling.prompt_logprobs is None:
            assert scores is None, f"seed {self.seed}: {name} did not ask"
        elif ended or scores is not None:
            assert scores == expected_logprobs(prompt, sampling.prompt_logprobs), f"seed {self.seed}: scores of {name}"
