"""Progress: how a batch looks while it runs, a bar on a terminal and a line now and then elsewhere, and its totals."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from deploy.jobs.batch import Totals
from deploy.jobs.discovery import Capacity
from deploy.jobs.pace import Pace

LINE_S = 10.0


class Display:
    """A context in which `show` shows. `pace` tells how many requests are under way."""

    def __init__(self, console: Console, pace: Pace, now: Callable[[], float] = time.monotonic) -> None:
        self.pace = pace
        self._console = console
        self._now = now
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said_at = float("-inf")
        self._trouble = ""
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, totals: Totals) -> None:
        """The batch has got so far."""
        done = totals.before + totals.documents
        if self._bar is not None and self._task is not None:
            text = self._state(totals)
            self._bar.update(self._task, total=totals.rows, completed=done, description=text)
        elif self._now() - self._said_at >= LINE_S or done == totals.rows:
            self._said_at = self._now()
            self._print(f"{done:,}/{totals.rows:,} documents, {self._state(totals)}")

    def trouble(self, text: str) -> None:
        """What the server or the way there says no with; said once as long as it stays the same."""
        if text != self._trouble:
            self._trouble = text
            self._print(f"waiting: {text}")

    def _state(self, totals: Totals) -> str:
        parts = [f"{totals.failed:,} errors"] if totals.failed else []
        if totals.seconds:
            parts.append(f"{totals.usage.completion_tokens / totals.seconds:,.0f} tokens/s")
        return ", ".join([*parts, f"{self.pace.under_way} under way"])

    def lines(self, texts: list[str]) -> None:
        """Say something besides."""
        for text in texts:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def totals_lines(totals: Totals, capacity: Capacity | None) -> list[str]:
    """What a batch has come to. `capacity`: what the service had to compute with meanwhile, where that is known."""
    usage, seconds = totals.usage, max(totals.seconds, 1e-9)
    both = usage.prompt_tokens + usage.completion_tokens
    before = f", {totals.before:,} done before" if totals.before else ""
    cached = f"{usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else "-"
    lines = [
        f"documents  {totals.documents:,} done{before}, {totals.failed:,} of them errors, {totals.missing:,} left",
        f"tokens     {both:,}: {usage.prompt_tokens:,} read ({cached} of them cached), "
        f"{usage.completion_tokens:,} written, in {usage.requests:,} requests",
        f"speed      {both / seconds:,.1f} tokens/s, {usage.completion_tokens / seconds:,.1f} of them written, "
        f"over {totals.seconds:,.1f} s",
    ]
    if capacity is not None:
        lines.append(
            f"service    {capacity.units * totals.seconds:,.1f} {capacity.name}-seconds "
            f"({capacity.units:,} {capacity.name}s, shared with whoever else used it)"
        )
    return lines
