"""The command `tidegate`: reads options, calls the parts, prints. Decides nothing itself."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.tenants import hash_of, make_key
from deploy import inspection, operations
from deploy.bench import command as benchmarks
from deploy.catalog import resolve
from deploy.config import ClusterConfig, ConfigError, load
from deploy.console import Stages
from deploy.house import strangers, tidegate_version
from deploy.jobs import command as batching
from deploy.models import command as modelling
from deploy.plan import command as planning
from deploy.quality import command as measuring
from deploy.question import QUESTION, ask, next_steps
from deploy.terminal import out, said_plainly
from deploy.upcycle import command as remodelling

cli = typer.Typer(
    name="tidegate",
    help="Serve large language models on Ray with a paged KV cache under control.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cli.add_typer(benchmarks.cli, name="bench")
cli.command()(inspection.status)
cli.command()(inspection.doctor)
cli.command()(planning.plan)
cli.command()(modelling.models)
cli.command()(remodelling.upcycle)
cli.command()(measuring.quality)
cli.command()(batching.summarize)
keys = typer.Typer(no_args_is_help=True, help="API keys, and their hashes for api_keys_file.")
cli.add_typer(keys, name="keys")
cli.add_typer(operations.config_cli, name="config")
cli.add_typer(operations.group_cli, name="group")


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
    with said_plainly():
        settings = load(config, changes)
        if question and settings.api_keys_file:
            raise ConfigError("--ask: this service wants API keys; ask it with a client that has one")
        _serve(settings, question or (QUESTION if first_question and not settings.api_keys_file else None))


def _serve(config: ClusterConfig, question: str | None) -> None:
    """Start, ask, wait for Ctrl-C; whatever happens, what was started is stopped."""
    stages = Stages()
    with stages:
        folders = [resolve(section.model, section.revision, stages) for section in config.sections]
        stages("loading Ray")
        from deploy import app
        from deploy.service import ServiceError
    service = None
    _listen_to_interrupts()
    try:
        with said_plainly(ServiceError):
            with stages:
                service = app.run(config, folders, stages)
            if question:
                ask(service.url, config.names[0], question, out)
            next_steps(service.url, config.names[0], _command(), out, keyed=config.api_keys_file is not None)
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


@keys.command("new")
def new_key() -> None:
    """Make an API key; print it for the client, and its hash for the file."""
    key, digest = make_key(secrets.token_bytes(32))
    print(f"key   {key}\nhash  {digest}")


@keys.command("hash")
def hash_key() -> None:
    """Print the hash of the key on standard input; on the command line everybody could see it."""
    if sys.stdin.isatty():
        print("the key, then Enter:", file=sys.stderr)
    print(hash_of(sys.stdin.readline().strip()))


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
