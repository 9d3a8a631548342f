"""The command `tidegate summarize`: its options to a batch, here or as a Ray job, and what came of it printed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from deploy.bench.command import api_key
from deploy.config import ConfigError, Environment
from deploy.jobs import places
from deploy.jobs.discovery import NoService
from deploy.jobs.dispatch import GaveUp
from deploy.jobs.documents import Input, InputError
from deploy.jobs.ledger import LedgerError
from deploy.jobs.run import Plan, Service, output_ledger, run_batch
from deploy.jobs.submission import Parcel, SubmissionError
from deploy.jobs.template import Template, TemplateError
from deploy.terminal import said_plainly

EXPECTED = (InputError, LedgerError, TemplateError, NoService, SubmissionError, GaveUp)
INTERRUPTED = 130
_HERE = {"input", "output", "order", "prompt_template", "submit", "address", "return_", "input_is_shared", "known"}
"""Options that are not passed on to a job as they are."""


def summarize(
    context: typer.Context,
    input: Annotated[Path, typer.Option(help="JSONL file (id, and text or path), OpenAI batch file, or a folder.")],
    output: Annotated[
        str | None, typer.Option(help="File of records, one per row; a URL as in s3://bucket/out.jsonl.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The service (default: the Ray cluster's in a job, else this machine's).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name (default: the service's first).")] = None,
    prompt_template: Annotated[
        Path | None, typer.Option(help="What to ask instead: a text with {text} in it, and {field} for others.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of an answer.")] = 256,
    context_tokens: Annotated[
        int | None, typer.Option("--context", min=64, help="Tokens of a request (default: the model's context).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    format: Annotated[
        Literal["auto", "documents", "openai"], typer.Option(help="What the rows are; auto: as the first one.")
    ] = "auto",
    order: Annotated[
        Literal["input", "completion"], typer.Option(help="Of the records, once all are there.")
    ] = "input",
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests under way at once, at the most.")] = 64,
    patience: Annotated[float, typer.Option(min=0, help="Seconds without any answer until it gives up.")] = 3600.0,
    request_timeout: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds a request may take.")] = 3600.0,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that are errors.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The model's folder, to count tokens here (default: the service counts).")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the API key; in a job, on its node.")] = None,
    output_is_shared: Annotated[
        bool, typer.Option("--output-is-shared", help="In a Ray job: the output will be there after the job.")
    ] = False,
    return_: Annotated[
        bool, typer.Option("--return", help="In a Ray job: results go back through the job's log.")
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Run as a Ray job, and follow it.")] = False,
    address: Annotated[str | None, typer.Option(help="With --submit: Ray's dashboard, http://host:8265.")] = None,
    input_is_shared: Annotated[
        bool, typer.Option("--input-is-shared", help="With --submit: the nodes see the input under the same path.")
    ] = False,
    known: Annotated[Path | None, typer.Option(hidden=True, help="What the submitter has already.")] = None,
) -> None:
    """Summarize many documents, or ask anything else of each, in the background of a running service.

    Run it again to go on after an interruption: rows that are done are not done again."""
    said = Console(stderr=True, highlight=False)
    with said_plainly(*EXPECTED):
        environment = Environment.read()
        plan = Plan(
            input=Input(input, None if format == "auto" else format),
            template=Template.read(prompt_template),
            max_tokens=max_tokens,
            context=context_tokens,
            temperature=temperature,
            max_in_flight=max_in_flight,
            patience_s=patience,
            timeout_s=request_timeout,
            retry_errors=retry_errors,
            in_order=order == "input",
            tokenizer=tokenizer,
        )
        if not submit or not input_is_shared:
            plan.input.check()
        if submit:
            parcel = Parcel(_words(context), plan.input, prompt_template, input_is_shared)
            whole = _submitted(parcel, plan, output, returns=return_, shared=output_is_shared, address=address, to=said)
        else:
            _check_here(output, environment, returns=return_, shared=output_is_shared)
            service = Service(url, model, api_key(key_file), environment)
            whole = _interruptible(
                run_batch(plan, service, lambda settings: output_ledger(output, known, settings), said), said
            )
    if not whole:
        raise typer.Exit(1)


def _check_here(output: str | None, environment: Environment, *, returns: bool, shared: bool) -> None:
    """Raises ConfigError for an output that will not be there when it is looked for."""
    if returns == (output is not None):
        raise ConfigError("give either --output, or --return in a Ray job" if returns else "--output: where to?")
    if returns and not environment.in_ray_job:
        raise ConfigError("--return: brings results back from a Ray job, and this is none: give --output")
    if not output or not environment.in_ray_job or shared:
        return
    if fault := places.fault(places.resolved(output), places.mounts_here()):
        raise ConfigError(fault)


def _submitted(
    parcel: Parcel, plan: Plan, output: str | None, *, returns: bool, shared: bool, address: str | None, to: Console
) -> bool:
    """Run it as a job. `returns`: the output is here; else it is where the job says."""
    from deploy.jobs import submitting

    if output is None:
        raise ConfigError("--output: where to? With --return a file here")
    if returns and places.is_url(output):
        raise ConfigError(f"--return: brings results to a file here, and --output {output} is a URL; leave it out")
    if not returns and not shared and not output.startswith("/") and not places.is_url(output):
        raise ConfigError(str(places.fault(output, ())))
    if returns:
        work = submitting.with_return(parcel, plan, Path(output), address, to)
        return _interruptible(work, to, note="left; the job goes on by itself")
    words = ["--output", output, "--order", "input" if plan.in_order else "completion"]
    words += ["--output-is-shared"] if shared else []
    work = submitting.without_return(parcel, words, address, to)
    return _interruptible(work, to, note="left; the job goes on by itself")


def _words(context: typer.Context) -> tuple[str, ...]:
    """The options of this call that a job gets too."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        value = context.params.get(name)
        if name in _HERE or name == "output_is_shared" or value is None or value is False or value == option.default:
            continue
        flag = next(one for one in option.opts if one.startswith("--"))
        words += [flag] if value is True else [flag, str(value)]
    return tuple(words)


def _interruptible(work: Coroutine[Any, Any, bool], said: Console, *, note: str = "stopped") -> bool:
    """Run it; Ctrl-C and SIGTERM (`ray job stop`) end it in good order, with a note."""

    async def main() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return bool(await work)

    try:
        return asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        said.print(f"{note}; run the same command again to go on", markup=False)
        raise typer.Exit(INTERRUPTED) from error
