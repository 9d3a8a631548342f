"""A seeded driver: random requests, aborts, silences and sessions against one engine over shadow ranks, invariants
after every turn, the oracle at the end. One seed is one run; a failure names it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvstore.store import KVStore
from tests.shadow import ShadowGroup, expected_output
from workers.engine import Engine
from workers.errors import EngineRefused
from workers.outbox import Outbox
from workers.plan import Finish, Limits, TokenEvent
from workers.scheduler import Scheduler
from workers.sequence import Priority, Request, Sampling

INGRESS = "ingress"


@dataclass(frozen=True)
class Setup:
    """What a seed decides about the engine."""

    blocks: int
    block_size: int
    groups: int
    depth: int
    max_num_seqs: int
    budget: int
    chunk: int
    ttl: float
    prefix_cache: bool
    watermark: float

    @classmethod
    def of(cls, rng: random.Random) -> Setup:
        return cls(
            blocks=rng.choice([12, 24, 40, 120]),
            block_size=rng.choice([1, 4, 8]),
            groups=rng.choice([1, 1, 2]),
            depth=rng.choice([1, 2]),
            max_num_seqs=rng.choice([1, 3, 8, 32]),
            budget=rng.choice([4, 16, 64]),
            chunk=rng.choice([3, 16, 64]),
            ttl=rng.choice([0.5, 5.0, 1e9]),
            prefix_cache=rng.random() < 0.85,
            watermark=rng.choice([0.0, 0.05, 0.2]),
        )


@dataclass
class Driver:
    """Runs one seed. `turns` counts engine turns; `finished` maps a request to its output and reason."""

    seed: int
    requests: int = 30
    setup: Setup | None = None
    now: float = 0.0
    turns: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    sent: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    cached: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.setup = self.setup or Setup.of(self.rng)
        s = self.setup
        self.store = KVStore(s.blocks, s.block_size, groups=s.groups, ttl=s.ttl, prefix_cache=s.prefix_cache)
        limits = Limits(s.max_num_seqs, s.budget, s.chunk)
        self.longest = min(60, s.blocks // s.groups * s.block_size)
        self.scheduler = Scheduler(
            self.store, limits, max_model_len=self.longest, watermark=s.watermark, resume_growth=8, zero_per_step=3
        )
        self.group = ShadowGroup(s.blocks, s.block_size)
        self.engine = Engine(self.scheduler, self.group, name="g", epoch=1, depth=s.depth, lease_s=1e12, audit_s=1e12)
        self.outbox: Outbox = self.engine.subscribe(INGRESS, lambda: None, self.now)
        self.bases = [tuple(self.rng.randrange(97) for _ in range(40)) for _ in range(3)]

    def run(self) -> Driver:
        while len(self.sent) < self.requests or not self.engine.idle:
            self.act()
            self.turn()
            assert self.turns < 200 * self.requests, f"seed {self.seed}: no end in sight"
        self.settle()
        return self

    def act(self) -> None:
        self.now += self.rng.choice([0.0, 0.01, 0.01, 0.3])
        if len(self.sent) < self.requests and self.rng.random() < 0.5:
            self.submit()
        live = [name for name in self.sent if name not in self.finishes and name not in self.aborted]
        if live and self.rng.random() < 0.05:
            name = self.rng.choice(live)
            self.aborted.add(name)
            self.engine.abort(name, 0)

    def submit(self) -> None:
        rng = self.rng
        length = rng.randint(1, self.longest - 1)
        base = rng.choice(self.bases)[: rng.randint(0, length)]
        prompt = (base + tuple(rng.randrange(97) for _ in range(length)))[:length]
        if self.sent and rng.random() < 0.2:
            size = self.store.block_size
            earlier = rng.choice(list(self.sent.values())).prompt
            prompt = earlier[: max(len(earlier) // size * size, 1)]
            length = len(prompt)
        sampling = Sampling(
            max_tokens=rng.randint(1, min(20, self.longest - length)),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            stop_ids=frozenset(rng.sample(range(97), rng.choice([0, 0, 2]))),
        )
        priority = rng.choice([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH])
        request = Request(f"r{len(self.sent)}", prompt, sampling, rng.choice([b"a", b"b"]), priority=priority)
        self.sent[request.id] = request
        try:
            self.engine.submit(INGRESS, request)
        except EngineRefused as refusal:  # the driver only sends what fits
            raise AssertionError(f"seed {self.seed}: {refusal}") from refusal

    def turn(self) -> None:
        self.turns += 1
        self.engine.turn(self.now)
        self.store.check()
        assert not self.group.named() & set(self.store.pool.ready_blocks()), "a block in flight is in circulation"
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
        if event.finish is not None:
            self.finishes[event.request] = event.finish
            self.cached += event.cached

    def settle(self) -> None:
        """After the last request: every request ended once and rightly, and every block came back."""
        for _ in range(4):
            self.turn()
        for name, request in self.sent.items():
            sampling = request.sampling
            want = expected_output(
                request.prompt, sampling.max_tokens, sampling.draw(0), self.group.vocabulary, sampling.stop_ids
            )
            got, finish = self.outputs.get(name, []), self.finishes[name]
            if finish is Finish.ABORT:
                assert name in self.aborted and got == want[: len(got)], f"seed {self.seed}: {name}"
            else:
                assert got == want, f"seed {self.seed}: {name} got {got}, not {want}"
                stopped = got[-1] in sampling.stop_ids
                assert finish is (Finish.STOP if stopped else Finish.LENGTH), f"seed {self.seed}: {name} {finish}"
        pool = self.store.pool
        assert pool.held == 0 and self.store.tables == 0, f"seed {self.seed}: {pool.held} blocks still held"
        assert pool.free + pool.idle + pool.dirty == pool.total
