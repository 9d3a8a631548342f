"""What the commands share on a terminal: where they print, how an error that a person can act on looks, a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.bench.client import ServerError
from deploy.bench.prompts import PromptError
from deploy.config import ConfigError
from deploy.staging import ModelError

Tick = Callable[[str, int, int], None]
"""Called with (what runs, how much of it is done, how much there is)."""

out = Console(highlight=False)


@contextmanager
def said_plainly(*more: type[Exception]) -> Iterator[None]:
    """Turn the errors that a person can act on, and `more` of them, into a message and exit status 1."""
    expected: tuple[type[Exception], ...] = (ConfigError, ModelError, PromptError, ServerError, *more)
    try:
        yield
    except expected as error:
        Console(stderr=True, highlight=False).print(f"tidegate: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def bar() -> Iterator[Tick]:
    """A progress bar on stderr, as the function that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def tick(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name)
            progress.update(bars[name], completed=done, total=total)

        yield tick
