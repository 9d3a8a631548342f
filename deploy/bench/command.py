"""The command `tidegate bench` and what stands below it: options to loads, results to tables and JSON lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deploy.bench import comparisons, crowds, scenarios
from deploy.bench import load as bench_load
from deploy.bench.client import ServerError
from deploy.bench.crowds import Target
from deploy.bench.figures import Figures
from deploy.bench.probe import PERIOD_S, Probe, summary
from deploy.catalog import resolve
from deploy.config import DEFAULT_MODEL, ConfigError
from deploy.machine import physical_cores
from deploy.tables import error_lines, figures_table, ratios
from deploy.terminal import Tick, bar, out, said_plainly

cli = typer.Typer(invoke_without_command=True, help="Load OpenAI-compatible servers, or the coordinator alone.")
Name = Literal["closed", "overload", "neighbour"]
_CONTEST = {"versus", "rounds", "seed", "timeout", "key_file", "as_json"}
_ROOFLINE = {"limits", "config", "model", "threads", "sweep", "concurrency", "prompt_words", "max_tokens", "rounds"}
_ROOFLINE |= {"seed", "as_json"}
"""The options of these two; their loads are of another kind."""


@cli.callback()
def bench(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Server to load, as URL or URL#MODEL.")] = "http://127.0.0.1:8000",
    versus: Annotated[
        list[str] | None,
        typer.Option("--vs", help="Another server or model, loaded in turn; or a .yaml file of servers to start."),
    ] = None,
    limits: Annotated[
        bool, typer.Option("--roofline", help="The engine alone, against what this machine can do at most.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Roofline: the service's YAML file.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name (default: the server's first).")] = None,
    scenario: Annotated[Name | None, typer.Option(help="Press a service: see deploy/bench/scenarios.py.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Scenario: seconds per phase.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often each server has its turn (scenario: 1) or is started (3).")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Scenario: also watch the services' own status.")] = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests per level.")] = 32,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Clients at once (default: 8, or a scenario's).")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: Poisson arrivals per second.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Levels of concurrency, as in 1,2,4,8.")] = None,
    prompts: Annotated[str, typer.Option(help="random, shared-prefix, multi-turn or a .jsonl file.")] = "random",
    prompt_words: Annotated[
        int | None, typer.Option(min=1, help="Words per prompt (random ones: half to 1.5 ×).")
    ] = None,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a multi-turn conversation.")] = 4,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens per request.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Always produce max-tokens.")] = True,
    session: Annotated[str | None, typer.Option(help="x-session-id that every request sends.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the API key to use.")] = None,
    quiet_key_file: Annotated[Path | None, typer.Option(help="Scenario neighbour: the quiet one's API key.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests that are not counted.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take.")] = 900.0,
    baseline: Annotated[str | None, typer.Option(help='"transformers": its generate in the same run.')] = None,
    model_dir: Annotated[Path | None, typer.Option(help="The baseline's model folder.")] = None,
    baseline_dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    threads: Annotated[int | None, typer.Option(min=1, help="The baseline's threads (default: all cores).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Load OpenAI-compatible servers and print a table and one JSON line."""
    if context.invoked_subcommand:
        return
    with said_plainly():
        if baseline not in (None, "transformers"):
            raise ConfigError(f"--baseline {baseline} is not known; the one there is: transformers")
        key = api_key(key_file)
        if limits:
            comparisons.refuse_others(context, "--roofline", _ROOFLINE)
            levels = _levels(sweep, None, concurrency or 1) if sweep or concurrency else comparisons.LEVELS
            comparisons.run_roofline(
                config,
                {"model": model, "threads": threads},
                levels=tuple(int(level) for level in levels),
                prompt_tokens=prompt_words or 128,
                max_tokens=max_tokens or 64,
                starts=rounds,
                seed=seed,
                as_json=as_json,
            )
            return
        if versus and comparisons.is_contest(versus):
            comparisons.refuse_others(context, "--vs FILE", _CONTEST)
            comparisons.run_contest(versus, starts=rounds, seed=seed, timeout_s=timeout, key=key, as_json=as_json)
            return
        if scenario:
            keys = {scenarios.FLOOD: key, scenarios.QUIET: api_key(quiet_key_file) or key}
            named = {name: value for name, value in keys.items() if value}
            targets = [Target.read(text, named) for text in (url, *(versus or ()))]
            targets[0] = replace(targets[0], model=targets[0].model or model)
            given = {"clients": concurrency, "seconds": seconds, "prompt_words": prompt_words, "max_tokens": max_tokens}
            _press(
                _scenario(scenario, given), targets, rounds or 1, probe, seed=seed, timeout_s=timeout, as_json=as_json
            )
            return
        plan = bench_load.Load(
            prompts=prompts,
            requests=requests,
            levels=_levels(sweep, rate, concurrency or 8),
            open_loop=rate is not None,
            prompt_words=prompt_words or 128,
            shared_words=shared_prefix,
            turns=turns,
            max_tokens=max_tokens or 64,
            ignore_eos=ignore_eos,
            session=session,
            seed=seed,
            warmup=warmup,
            timeout_s=timeout,
            key=key,
        )
        servers = [_server(url, model), *(_server(other, None) for other in versus or ())]
        with bar() as tick:
            figures = asyncio.run(bench_load.compare(plan, servers, tick))
            if baseline:
                tick("transformers' generate", 0, 1)
                folder = model_dir or resolve(DEFAULT_MODEL, None, lambda text: None)
                cores = threads or physical_cores()
                figures += bench_load.baseline(plan, folder, dtype=baseline_dtype, threads=cores)
    if not as_json:
        out.print(figures_table(figures))
        for line in [*ratios(figures), *error_lines(figures)]:
            out.print(line, markup=False, soft_wrap=True)
    _end(figures)


@cli.command()
def coordinator(
    calls: Annotated[int, typer.Option(min=10, help="Calls of each kind per size.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """The coordinator in plain Python: microseconds per call by size, and its memory."""
    from deploy.bench.coordination import show

    with said_plainly():
        show(calls=calls, as_json=as_json)


@cli.command()
def pairs(
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each turn.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each actor.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """The coordinator's actor over Ray: place and settle pairs per second, beside an actor with empty methods."""
    from deploy.bench.coordination_ray import show

    with said_plainly():
        show(seconds=seconds, rounds=rounds, as_json=as_json)


def _scenario(name: Name, given: dict[str, Any]) -> scenarios.Scenario:
    """The scenario with what was given on the command line, as far as it has such a setting."""
    make: Any = {"closed": scenarios.closed, "overload": scenarios.overload, "neighbour": scenarios.neighbour}[name]
    known = make.__kwdefaults__
    if unknown := [key for key, value in given.items() if value is not None and key not in known]:
        raise ConfigError(f"--{unknown[0].replace('_', '-')}: scenario {name} has no such setting")
    return make(**{key: value for key, value in given.items() if value is not None})


def _press(
    scenario: scenarios.Scenario,
    targets: list[Target],
    rounds: int,
    probe: bool,
    *,
    seed: int,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Every target in turn, `rounds` times, so that a machine that slows down does so for all of them."""
    rows, notes = [], []
    with bar() as tick:
        for number in range(rounds):
            for target in targets:
                found, seen = _play(scenario, target, tick, probe, seed=seed + number, timeout_s=timeout_s)
                rows += found
                notes += [seen] if seen else []
    if not as_json:
        out.print(figures_table(rows))
        for line in [*crowds.ttft_ratios(rows), *error_lines(rows)]:
            out.print(line, markup=False, soft_wrap=True)
        for note in notes:
            out.print(", ".join(f"{key} {value}" for key, value in note.items()), markup=False, soft_wrap=True)
    if notes:
        print(json.dumps(notes))
    _end(rows)


def _play(
    scenario: scenarios.Scenario, target: Target, tick: Tick, probe: bool, *, seed: int, timeout_s: float
) -> tuple[list[Figures], dict[str, Any] | None]:
    """One target's turn, and what its service said meanwhile."""
    with _watched(target) if probe else nullcontext() as watching:
        rows = asyncio.run(crowds.play(scenario, target, tick, seed=seed, timeout_s=timeout_s))
    if watching is None:
        return rows, None
    warm = int(scenario.phases[0].warm_s / PERIOD_S) if len(scenario.phases) == 1 else 0
    seen = summary(watching.looks[warm:] or watching.looks, target.model)  # as the figures leave the warm-up out
    return rows, {"server": f"{target.url}#{target.model or ''}", **(seen.as_json() if seen else {})}


@contextmanager
def _watched(target: Target) -> Iterator[Probe]:
    """A probe on the service of this machine that answers at the target's URL."""
    from deploy import app
    from deploy.service import ServiceError

    try:
        with app.watching(url=target.url) as look, Probe(look, (ServiceError,)) as probe:
            yield probe
    except ServiceError as error:
        raise ServerError(str(error)) from error


def api_key(path: Path | None) -> str | None:
    """The API key in a file."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _server(text: str, model: str | None) -> tuple[str, str | None]:
    target = Target.read(text, {})
    return target.url, target.model or model


def _levels(sweep: str | None, rate: float | None, concurrency: int) -> tuple[float, ...]:
    if sweep is None:
        return (rate if rate is not None else concurrency,)
    if rate is not None:
        raise ConfigError("--sweep goes over concurrency; give either --sweep or --rate")
    levels = []
    for part in sweep.split(","):
        with suppress(ValueError):
            levels.append(int(part))
    if len(levels) != len(sweep.split(",")) or min(levels) < 1:
        raise ConfigError(f"--sweep {sweep}: expected numbers of at least 1 with commas, as in 1,2,4,8")
    return tuple(levels)


def _end(figures: list[Figures]) -> None:
    """The JSON line; exit status 1 when nothing at all succeeded."""
    print(json.dumps([row.as_json() for row in figures]))
    if all(row.failed == row.requests for row in figures):
        raise typer.Exit(1)
