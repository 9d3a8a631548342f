"""What `tidegate bench --vs FILE` and `tidegate bench --roofline` do with their options, and what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from deploy.bench import roofline, standings, versus
from deploy.bench.client import ServerError
from deploy.bench.contest import Contest
from deploy.bench.standings import Turn
from deploy.catalog import resolve
from deploy.config import ConfigError, Environment, load
from deploy.console import Stages
from deploy.machine import physical_cores
from deploy.settings import group_settings
from deploy.terminal import bar, out

STARTS = 3
LEVELS = (1, 8, 32)


def is_contest(values: list[str] | None) -> bool:
    """Whether --vs names a file of servers to start, not a server that runs."""
    return any(Path(value).suffix in (".yaml", ".yml") for value in values or ())


def refuse_others(context: typer.Context, what: str, known: set[str]) -> None:
    """Raise ConfigError for an option that was given and that `what` does not have."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source and source.name == "COMMANDLINE" and option.name not in known:
            raise ConfigError(f"{option.opts[0]}: {what} has no such option")


def run_contest(
    values: list[str], *, starts: int | None, seed: int, timeout_s: float, key: str | None, as_json: bool
) -> None:
    """Play the contest of the only file named; print medians, ratios, and who kept the cores busy, also of one that is
    cut short. Exit status 1 when that was so, or a server answered nothing at all."""
    if len(values) > 1:
        raise ConfigError("--vs: a file of servers stands alone; all servers go into it")
    path = Path(values[0]).expanduser()
    contest = Contest.read(path)
    turns: list[Turn] = []

    def said(turn: Turn) -> None:
        turns.append(turn)
        _say(turn)

    try:
        with bar() as tick:
            versus.play(
                contest,
                here=path.absolute().parent,
                starts=starts or STARTS,
                tick=tick,
                said=said,
                watch=_watch,
                seed=seed,
                timeout_s=timeout_s,
                key=key,
            )
    finally:
        if turns:
            _print_standings(turns, contest.servers[0].name, as_json)
    if any(row.output_tok_s is None for row in standings.standings(turns)):
        raise typer.Exit(1)


def _print_standings(turns: list[Turn], first: str, as_json: bool) -> None:
    rows = standings.standings(turns)
    if not as_json:
        out.print(standings.standings_table(rows))
        for line in [*(ratio.text() for ratio in standings.ratios(turns, first)), *standings.remarks(rows)]:
            out.print(line, markup=False, soft_wrap=True)
    print(json.dumps(standings.as_json(turns, first)))


def run_roofline(
    config: Path | None,
    changes: dict[str, object],
    *,
    levels: tuple[int, ...],
    prompt_tokens: int,
    max_tokens: int,
    starts: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure the first model of `config` (None: the default one) with `changes` before it, on one rank."""
    chosen = load(config, changes)
    section, environment = chosen.sections[0], Environment.read()
    with Stages() as stages:
        folder = resolve(section.model, section.revision, stages)
    settings = group_settings(
        chosen, section, folder, "", device="cpu", cores=physical_cores(), environment=environment
    )
    with bar() as tick:
        found = roofline.measure(
            replace(settings, tensor_parallel_size=1),
            levels=levels,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            seed=seed,
            starts=starts or STARTS,
            tick=tick,
        )
    if not as_json:
        out.print(roofline.reached_table(roofline.reached(found)))
        waits = (f"{clients}: {wait.text(0)} ms" for clients, wait in roofline.first_tokens(found).items())
        out.print("TTFT p50 by clients: " + ", ".join(waits), markup=False, soft_wrap=True)
        kernels, threads, meter = (found[0][key] for key in ("kernels", "threads", "meter"))
        said = f"{section.names[0]}: kernels {kernels}, {threads} threads; at most ({meter}): "
        out.print(said + roofline.ceiling(found).text(), markup=False, soft_wrap=True)
    print(json.dumps(roofline.as_json(found)))


def _say(turn: Turn) -> None:
    """What a turn gave, as soon as it is over: a contest may take long, or be cut short."""
    row = turn.figures
    ttft = f", TTFT p50 {row.ttft_ms.p50:.0f} ms" if row.ttft_ms else ""
    failed = f", {row.failed} of {row.requests} failed: {row.errors[0][0]}" if row.failed else ""
    text = f"start {turn.start}, {turn.server}: {turn.load}: {row.output_tok_s:.1f} tokens/s{ttft}{failed}"
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


@contextmanager
def _watch(url: str) -> Iterator[versus.Look]:
    """The status of the service of this machine that answers at `url`."""
    from deploy import app
    from deploy.service import ServiceError

    try:
        with app.watching(url=url) as look:
            yield look
    except ServiceError as error:
        raise ServerError(str(error)) from error
