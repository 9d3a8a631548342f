"""Lead and follow: how one plan reaches every rank of a group, in order. They know plans, not what a plan computes.

Rank 0 runs a Lead, the engine's Group: one worker thread fills in tokens that the step before has just sampled, sends
the plan to the followers and runs it, so that the next plan may be launched while this one runs. Every other rank sits
in `follow`.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from workers.parallel import Communicator
from workers.plan import PENDING, GroupDead, StepPlan, StepResult

IDLE_PLAN = StepPlan(step=-1)
"""Sent while there is nothing to do, so that no follower waits in a collective until its timeout."""


class Runs(Protocol):
    """What computes a plan: a Runner. `drops` counts the steps for which a rank had no memory."""

    drops: int

    def step(self, plan: StepPlan) -> StepResult:
        """Sampled tokens on rank 0, () elsewhere and where the step was dropped."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    plan: StepPlan
    result: Future[StepResult]


class Lead:
    """The Group of rank 0. Plans run in the order launched; after the first failure every plan fails with GroupDead.

    An idle group sends an empty plan every `idle_s` seconds.
    """

    def __init__(self, runner: Runs, comm: Communicator, *, idle_s: float = 5.0) -> None:
        self._runner = runner
        self._comm = comm
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: tuple[int, ...] = ()
        self._cause: BaseException | None = None
        self._gate = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="lead", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Queue `plan` and return its handle at once."""
        job = _Job(plan, Future())
        with self._gate:
            if self._stopped:
                job.result.set_exception(GroupDead("the group was stopped"))
            else:
                self._jobs.put(job)
        return job.result

    def wait(self, handle: object) -> StepResult:
        """The result behind a handle of `launch`. Raises GroupDead when a rank is gone or the step failed."""
        assert isinstance(handle, Future)
        try:
            result: StepResult = handle.result()
        except GroupDead:
            raise
        except Exception as error:
            raise GroupDead(f"the step failed: {error}") from error
        return result

    def stop(self, timeout_s: float = 30.0) -> None:
        """Run what was launched, end the followers' loops and the worker thread; later plans fail with GroupDead.

        A step that still runs after `timeout_s` is cut off by hanging up.
        """
        with self._gate:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._comm.close()
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if self._cause is not None:
                job.result.set_exception(GroupDead(f"the group is dead: {self._cause}"))
                continue
            try:
                job.result.set_result(self._step(job.plan))
            except Exception as error:
                self._die(error)
                job.result.set_exception(GroupDead(f"step {job.plan.step} failed: {error}"))
        self._end()

    def _next(self) -> _Job | None:
        while True:
            try:
                return self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                self._keep_awake()

    def _keep_awake(self) -> None:
        if self._cause is not None:
            return
        try:
            self._comm.broadcast_plan(IDLE_PLAN)
        except RuntimeError as error:
            self._die(error)

    def _step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        # A plan that builds on a dropped step will be dropped as well: its pending tokens were never sampled.
        if plan.drops >= self._runner.drops:
            plan = fill_pending(plan, self._last)
        self._comm.broadcast_plan(plan)
        result = self._runner.step(plan)
        self._last = result.tokens
        return replace(result, seconds=time.perf_counter() - began)

    def _die(self, error: BaseException) -> None:
        """After a failure the ranks no longer agree on where they are: hang up, so that followers end as well."""
        self._cause = error
        self._comm.close()

    def _end(self) -> None:
        if self._cause is not None:
            return
        try:
            self._comm.broadcast_plan(None)
        except RuntimeError as error:
            self._die(error)


def fill_pending(plan: StepPlan, sampled: tuple[int, ...]) -> StepPlan:
    """`plan` with every PENDING token replaced by what row `source` of the step before sampled."""
    if not any(row.source is not None for row in plan.rows):
        return plan
    rows = []
    for row in plan.rows:
        if row.source is None:
            rows.append(row)
            continue
        if row.tokens != (PENDING,) or not 0 <= row.source < len(sampled):
            raise ValueError(f"step {plan.step}: row source {row.source} of {len(sampled)} sampled rows, {row.tokens}")
        rows.append(row.filled(sampled[row.source]))
    return replace(plan, rows=tuple(rows))


def follow(runner: Runs, comm: Communicator) -> None:
    """Run rank 0's plans until it says stop. Any failure hangs up, so that the others end too, and is raised."""
    try:
        while (plan := comm.receive_plan()) is not None:
            runner.step(plan)
    except BaseException:
        comm.close()
        raise
