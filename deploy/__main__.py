"""The command `tidegate`: reads options, calls the parts, prints. Decides nothing itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy import bench as bench_load
from deploy.catalog import resolve
from deploy.client import ServerError
from deploy.config import ClusterConfig, ConfigError, load
from deploy.console import Stages
from deploy.house import strangers, tidegate_version
from deploy.machine import physical_cores
from deploy.prompts import PromptError
from deploy.question import QUESTION, ask, next_steps
from deploy.tables import error_lines, figures_table, ratios, status_tables
from deploy.wheelmodel import ModelError

cli = typer.Typer(
    name="tidegate",
    help="Serve large language models on Ray with a paged KV cache under control.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)


@contextmanager
def _said_plainly(*more: type[Exception]) -> Iterator[None]:
    """Turn the errors that a person can act on, and `more` of them, into a message and exit status 1."""
    expected: tuple[type[Exception], ...] = (ConfigError, ModelError, PromptError, ServerError, *more)
    try:
        yield
    except expected as error:
        Console(stderr=True, highlight=False).print(f"tidegate: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@cli.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file; see deploy/configs/cpu.yaml.")] = None,
    model: Annotated[str | None, typer.Option(help="smollm2-135m, a local folder, or a hub id.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the hub id.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks per group.")] = None,
    groups: Annotated[int | None, typer.Option(help="Groups that share the load.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help='KV pool of each rank, as in "72MiB".')] = None,
    question: Annotated[str | None, typer.Option("--ask", help="Ask this once the service is up.")] = None,
    first_question: Annotated[bool, typer.Option("--first-question", help=f"Ask: {QUESTION}")] = False,
) -> None:
    """Start a service and keep it up until Ctrl-C."""
    changes = {
        "model": model,
        "revision": revision,
        "tensor_parallel_size": tp,
        "groups": groups,
        "port": port,
        "kv_memory": kv_memory,
    }
    with _said_plainly():
        settings = load(config, changes)
        _serve(settings, question or (QUESTION if first_question else None))


def _serve(config: ClusterConfig, question: str | None) -> None:
    """Start, ask, wait for Ctrl-C; whatever happens, what was started is stopped."""
    stages = Stages()
    with stages:
        folder = resolve(config.model, config.revision, stages)
        stages("loading Ray")
        from deploy import app
        from deploy.service import ServiceError
    service = None
    _listen_to_interrupts()
    try:
        with _said_plainly(ServiceError):
            with stages:
                service = app.run(config, folder, stages)
            if question:
                ask(service.url, config.names[0], question, out)
            next_steps(service.url, config.names[0], _command(), out)
            _wait_for_interrupt()
    except KeyboardInterrupt:
        out.print("\nstopping", style="dim")
    finally:
        if service is not None:
            _stop(service, stages)


def _command() -> str:
    """How a person calls this program: by its name where that is on the PATH, else by the path it was started with."""
    return "tidegate" if shutil.which("tidegate") or Path(sys.argv[0]).stem != "tidegate" else sys.argv[0]


def _listen_to_interrupts() -> None:
    """SIGINT and SIGTERM end the service, also where a script has started it in the background (and SIGINT ignored)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _wait_for_interrupt() -> None:
    """Until Ctrl-C or SIGTERM. Ray has put a handler of its own in place that prints a stack first."""
    _listen_to_interrupts()
    threading.Event().wait()


def _stop(service: Any, stages: Stages) -> None:
    """Drain and end `service`; a further Ctrl-C does not cut that short, so that nothing is left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with stages:
        stages("draining and stopping")
        service.close()


@cli.command()
def status(
    address: Annotated[str | None, typer.Option(help="Ray cluster (default: the service on this machine).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show groups, ranks, pool and sessions of a running service."""
    from deploy import app
    from deploy.service import ServiceError

    with _said_plainly(ServiceError, ConnectionError):
        found = app.status(address)
    if as_json:
        print(json.dumps(found))
    else:
        out.print(f"{found['service']} at {found['url'] or 'an unknown URL'}", style="bold")
        for table in status_tables(found):
            out.print(table)


@cli.command()
def bench(
    url: Annotated[str, typer.Option(help="Server to load.")] = "http://127.0.0.1:8000",
    versus: Annotated[list[str] | None, typer.Option("--vs", help="Another server, loaded in turn.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name (default: the server's first).")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per level.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: clients at once.")] = 8,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: Poisson arrivals per second.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Levels of concurrency, as in 1,2,4,8.")] = None,
    prompts: Annotated[str, typer.Option(help="random, shared-prefix, multi-turn or a .jsonl file.")] = "random",
    prompt_words: Annotated[int, typer.Option(min=1, help="Words per prompt (random ones: half to 1.5 ×).")] = 128,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a multi-turn conversation.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Always produce max-tokens.")] = True,
    session: Annotated[str | None, typer.Option(help="x-session-id that every request sends.")] = None,
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
    with _said_plainly():
        if baseline not in (None, "transformers"):
            raise ConfigError(f"--baseline {baseline} is not known; the one there is: transformers")
        plan = bench_load.Load(
            prompts=prompts,
            requests=requests,
            levels=_levels(sweep, rate, concurrency),
            open_loop=rate is not None,
            prompt_words=prompt_words,
            shared_words=shared_prefix,
            turns=turns,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            session=session,
            seed=seed,
            warmup=warmup,
            timeout_s=timeout,
        )
        servers = [(url, model), *((other, None) for other in versus or ())]
        with _bar() as tick:
            figures = asyncio.run(bench_load.compare(plan, servers, tick))
            if baseline:
                tick("transformers' generate", 0, 1)
                folder = model_dir or resolve(ClusterConfig().model, None, lambda text: None)
                cores = threads or physical_cores()
                figures += bench_load.baseline(plan, folder, dtype=baseline_dtype, threads=cores)
    if not as_json:
        out.print(figures_table(figures))
        for line in [*ratios(figures), *error_lines(figures)]:
            out.print(line, markup=False, soft_wrap=True)
    print(json.dumps([row.as_json() for row in figures]))
    if all(row.failed == row.requests for row in figures):
        raise typer.Exit(1)


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


@contextmanager
def _bar() -> Iterator[bench_load.Tick]:
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


@cli.command()
def version() -> None:
    """Print the version."""
    print(tidegate_version())


def main() -> None:
    """Entry point of the command."""
    if faults := strangers():
        sys.exit("tidegate: another distribution stands in the way:\n" + "\n".join(f"  {fault}" for fault in faults))
    cli()


if __name__ == "__main__":
    main()
