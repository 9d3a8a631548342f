"""The commands that look: `tidegate status` and `tidegate doctor`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from deploy import watch as watching
from deploy.config import load
from deploy.doctor import findings_table, is_well
from deploy.tables import status_tables
from deploy.terminal import out, said_plainly


def status(
    address: Annotated[str | None, typer.Option(help="Ray cluster (default: the service on this machine).")] = None,
    service: Annotated[str | None, typer.Option(help="Name of the service (default: the only one).")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until Ctrl-C.")] = False,
    frames: Annotated[int | None, typer.Option(min=1, help="Watch: end after so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show groups, ladder, waiting line, ranks and sessions of a running service."""
    from deploy import app
    from deploy.service import ServiceError

    with said_plainly(ServiceError, ConnectionError):
        if watch:
            with app.watching(address, service=service) as look, suppress(KeyboardInterrupt):
                watching.watch(look, out, frames, (ServiceError,))
            return
        found = app.status(address, service=service)
    if as_json:
        print(json.dumps(found))
        return
    out.print(f"{found['service']} at {found['url'] or 'an unknown URL'}", style="bold")
    for table in status_tables(found):
        out.print(table)


def doctor(
    config: Annotated[Path | None, typer.Option(help="YAML file of the service that is to run here.")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster (default: the one of this machine).")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Remove what of ours no service owns any more.")] = False,
) -> None:
    """Check versions, ports, memory, threads and what is left on Ray; exit status 1 when something is wrong."""
    with said_plainly():
        settings = load(config)
        from deploy.survey import examine

        findings = examine(settings, address, fix=fix)
    out.print(findings_table(findings))
    if not is_well(findings):
        raise typer.Exit(1)
