"""The engine alone, without HTTP and Ray, against what the machine allows: a job as JSON on stdin, its result as one
JSON line on stdout.

A process of its own, as what a process gets of a machine differs from start to start: `python -m deploy.bench.solo`.
One rank, one closed loop per level; the machine's peaks are measured before and behind each of them.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deploy.bench.peaks import Measured, PeakMeter
from deploy.bench.stepwork import Peaks, Shape, Work
from workers.engine import Engine
from workers.errand import run_errand
from workers.models.reading import read_native
from workers.native.library import Library, NativeUnavailable, load_library
from workers.plan import StepPlan, StepResult
from workers.rank import Rank
from workers.recorder import Recorder
from workers.sequence import Request, Sampling
from workers.settings import GroupSettings

CLIENT = "solo"
HOST = "127.0.0.1"
PER_CLIENT, FEWEST = 4, 8
"""Requests of a level: so many for each client, one after the other, and no fewer than that."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure: so many clients at once per level, prompts of half to 1.5 × `prompt_tokens`, outputs of
    `max_tokens`."""

    settings: dict[str, Any]
    levels: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Format:
    """How kernels compute: the formats of the linears and of the rest, as `Measured.operations` names them, and the
    bytes of a weight."""

    linear: str
    other: str
    item: int

    @classmethod
    def of(cls, kernels: str) -> Format:
        """From the kernels' name: "native-avx512bf16", "native-avx2-int8", "onednn-fp32", …"""
        computed = "bf16" if "bf16" in kernels else "fp32"
        item = 4 if kernels.endswith("fp32") else 2
        return cls("int8", computed, 1) if kernels.endswith("int8") else cls(computed, computed, item)

    def peaks(self, before: Measured, after: Measured) -> Peaks:
        """The mean of what was measured before and behind. A format without instructions of its own is computed in
        fp32."""

        def operations(kind: str) -> float:
            return sum(each.operations.get(kind, each.operations["fp32"]) for each in (before, after)) / 2

        return Peaks(operations(self.linear), operations(self.other), (before.read + after.read) / 2)


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it ran: `seconds` from the end of the one before, planning included."""

    phase: str
    seconds: float
    tokens: int
    sampled: int
    work: Work


class StepWatch(Recorder):
    """Stands in for the engine's flight recorder and notes what each step was and took. One step in flight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._shape = shape
        self._plan = StepPlan(-1)
        self._since = 0.0

    def begin(self) -> None:
        """From here on time counts."""
        self.steps = []
        self._since = time.perf_counter()

    def plan(self, plan: StepPlan, now: float) -> None:
        self._plan = plan

    def result(self, result: StepResult, now: float) -> None:
        ended = time.perf_counter()
        plan, seconds, self._since = self._plan, ended - self._since, ended
        if plan.rows and not result.dropped:
            sampled = len(result.tokens)
            self.steps.append(Step(phase_of(plan), seconds, plan.tokens, sampled, self._shape.work(plan)))


def phase_of(plan: StepPlan) -> str:
    """ "decode": one token per row; "prefill": chunks of prompts alone; "mixed": both."""
    singles = sum(len(row.tokens) == 1 for row in plan.rows)
    return "decode" if singles == len(plan.rows) else "mixed" if singles else "prefill"


def main() -> None:
    """Read the job, run it, print {"kernels": …, "levels": […]}."""
    job = json.load(sys.stdin)
    print(json.dumps(run(Job(**{**job, "levels": tuple(job["levels"])}))))


def run(job: Job) -> dict[str, Any]:
    """Plain values: the kernels, how the peaks were measured, and per level what `_level` gives."""
    settings = replace(GroupSettings.parse(job.settings), overlap=1)
    rank = Rank(0, settings)
    facts = rank.load(None, HOST)
    rank.allocate(facts.blocks)
    engine = rank.make_engine(facts.blocks, CLIENT)
    form, spec = Format.of(facts.kernel), read_native(Path(settings.model_dir))
    shape = Shape.of(spec, rank.runner.layout, item=form.item)
    meter = run_errand(lambda: PeakMeter(_library(settings.native_dir)))
    watch = engine.recorder = StepWatch(shape)
    rng = random.Random(job.seed)
    closed_loop(engine, 1, _prompts(job, 1, rng, spec.vocab_size), 4)  # first calls are slower
    levels, before = [], run_errand(meter)
    for clients in job.levels:
        prompts = _prompts(job, max(PER_CLIENT * clients, FEWEST), rng, spec.vocab_size)
        watch.begin()
        loop = closed_loop(engine, clients, prompts, job.max_tokens)
        after = run_errand(meter)
        levels.append(_level(clients, loop, watch.steps, form.peaks(before, after)))
        before = after
    rank.stop()
    return {"kernels": facts.kernel, "threads": facts.threads, "meter": meter.how, "levels": levels}


@dataclass(frozen=True, slots=True)
class Loop:
    """What a closed loop took: seconds in all, output tokens, and each request's seconds to its first token."""

    wall_s: float
    tokens: int
    ttfts: tuple[float, ...]


def closed_loop(engine: Engine, clients: int, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Loop:
    """All prompts, `clients` at once. Raises EngineRefused when one cannot be taken."""
    began = time.perf_counter()
    outbox = engine.subscribe(CLIENT, lambda: None, time.monotonic())
    waiting = iter(enumerate(prompts))
    silent: dict[str, float] = {}
    ttfts: list[float] = []
    running = tokens = 0
    while True:
        while running < clients and (asked := next(waiting, None)):
            name = f"{began}-{asked[0]}"
            silent[name] = time.perf_counter()
            engine.submit(CLIENT, Request(name, asked[1], Sampling(max_tokens), b"solo", grant=name))
            running += 1
        if not running:
            break
        engine.turn(time.monotonic())
        while message := outbox.read():
            now = time.perf_counter()
            for event in message.events:
                tokens += len(event.tokens)
                running -= event.finish is not None
                if event.tokens and event.request in silent:
                    ttfts.append(now - silent.pop(event.request))
            engine.ack(CLIENT, message.number)
        engine.renew(CLIENT, time.monotonic())
    seconds = time.perf_counter() - began
    engine.unsubscribe(CLIENT)
    engine.turn(time.monotonic())
    return Loop(seconds, tokens, tuple(ttfts))


def _prompts(job: Job, count: int, rng: random.Random, vocabulary: int) -> list[tuple[int, ...]]:
    """Random tokens: nothing that a prefix cache or a model would find easier than text."""
    lengths = (rng.randint(max(1, job.prompt_tokens // 2), job.prompt_tokens * 3 // 2) for _ in range(count))
    return [tuple(rng.randrange(vocabulary) for _ in range(length)) for length in lengths]


def _level(clients: int, loop: Loop, steps: list[Step], peaks: Peaks) -> dict[str, Any]:
    """Per phase, and over all of it, how long it took and how long it would take at the machine's peaks; the median of
    the seconds to a first token."""
    phases = {}
    for phase in dict.fromkeys(step.phase for step in steps):
        mine = [step for step in steps if step.phase == phase]
        phases[phase] = {
            "steps": len(mine),
            "seconds": sum(step.seconds for step in mine),
            "least_s": sum(peaks.seconds(step.work) for step in mine),
            "tokens": sum(step.tokens for step in mine),
            "sampled": sum(step.sampled for step in mine),
        }
    total = {"steps": len(steps), "seconds": loop.wall_s, "sampled": loop.tokens}
    total["tokens"] = sum(step.tokens for step in steps)
    total["least_s"] = sum(phase["least_s"] for phase in phases.values())
    ttft_s = statistics.median(loop.ttfts)
    return {"clients": clients, "peaks": asdict(peaks), "phases": {**phases, "all": total}, "ttft_s": ttft_s}


def _library(folder: str | None) -> Library | None:
    """The library to measure peaks with, whatever the kernels are."""
    try:
        return load_library(Path(folder) if folder else None)
    except NativeUnavailable:
        return None


if __name__ == "__main__":
    main()
