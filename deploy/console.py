"""How progress looks: a spinner with the current stage on a terminal, one line per stage elsewhere. On stderr, so that
what a command prints can be piped."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Stages:
    """Callable with a text that says what goes on now: "stage" or "stage: figures". A finished stage stays on the
    screen with the seconds it took; figures that change are shown in place. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._stage = ""
        self._began = 0.0

    def __call__(self, text: str) -> None:
        stage = text.partition(":")[0].strip()
        if stage != self._stage:
            self.finish()
            self._stage, self._began = stage, time.monotonic()
            if not self.console.is_terminal:
                self.console.print(f"· {text}", markup=False)
        if self.console.is_terminal:
            self._show(text)

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self._hide()

    def finish(self) -> None:
        """Tick the current stage off."""
        self._hide()
        if self._stage:
            seconds = time.monotonic() - self._began
            self.console.print(f"✓ {self._stage} ({seconds:.1f} s)", style="green", markup=False, highlight=False)
        self._stage = ""

    def _show(self, text: str) -> None:
        if self._status is None:
            self._status = self.console.status("")
            self._status.start()
        self._status.update(Text(text))

    def _hide(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
