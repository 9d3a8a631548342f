"""The commands that change a running service: `tidegate config …` and `tidegate group …`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.changes import Change, differences
from deploy.config import load
from deploy.console import Stages
from deploy.tables import plain_table
from deploy.terminal import out, said_plainly

ARRIVAL_S = 15.0
"""How long a change may take to reach all groups and ingresses before that is said."""
RESTART_S = 600.0
"""How long a group may take to be built anew."""

config_cli = typer.Typer(no_args_is_help=True, help="What a change of config takes, and carrying it out while it runs.")
group_cli = typer.Typer(no_args_is_help=True, help="Single groups of a running service.")

Address = Annotated[str | None, typer.Option(help="Ray cluster (default: the service on this machine).")]
Name = Annotated[str | None, typer.Option(help="Name of the service (default: the only one).")]
Rolling = Annotated[bool, typer.Option("--rolling", help="Replace groups one by one where that is what it takes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Group = Annotated[str, typer.Argument(help="Its name in `tidegate status`.")]
Within = Annotated[float, typer.Option(min=0, help="Seconds that running requests get before they are handed over.")]


@config_cli.command()
def diff(
    old: Annotated[Path, typer.Argument(help="YAML file.")],
    new: Annotated[Path, typer.Argument(help="YAML file.")],
    as_json: Json = False,
) -> None:
    """What changes from OLD to NEW, and what each key takes: live, one group at a time, or a new cluster."""
    with said_plainly():
        changes = differences(load(old), load(new))
    if as_json:
        print(json.dumps({"changes": [change.plain for change in changes]}))
    else:
        _show(changes)


@config_cli.command()
def apply(
    file: Annotated[Path, typer.Argument(help="YAML file.")],
    rolling: Rolling = False,
    address: Address = None,
    service: Name = None,
    as_json: Json = False,
) -> None:
    """Put FILE in force in a running service."""
    from deploy.panel import panel
    from deploy.service import ServiceError

    stages = Stages()
    with said_plainly(ServiceError, ConnectionError), stages:
        config = load(file)
        with panel(address, service) as found:
            changes = found.changes(config)
            revision = found.apply(config, stages, rolling=rolling)
            missing = found.await_arrival(revision.number, ARRIVAL_S)
    _conclude(revision, changes, missing, as_json)


@config_cli.command()
def rollback(rolling: Rolling = False, address: Address = None, service: Name = None, as_json: Json = False) -> None:
    """Return to the config before the one in force."""
    from deploy.panel import panel
    from deploy.service import ServiceError

    stages = Stages()
    with said_plainly(ServiceError, ConnectionError), stages, panel(address, service) as found:
        revision = found.rollback(stages, rolling=rolling)
        missing = found.await_arrival(revision.number, ARRIVAL_S)
    _conclude(revision, (), missing, as_json)


@config_cli.command()
def purge(address: Address = None, service: Name = None) -> None:
    """Have every group forget and zero all that it has cached."""
    from cluster.coordination.control import Purge
    from deploy.panel import panel
    from deploy.service import ServiceError

    with said_plainly(ServiceError, ConnectionError), panel(address, service) as found:
        revision = found.carry_out(Purge())
        missing = found.await_arrival(revision.number, ARRIVAL_S)
    _conclude(revision, (), missing, as_json=False)


@group_cli.command()
def cordon(group: Group, address: Address = None, service: Name = None) -> None:
    """Give GROUP nothing new; what runs there goes on."""
    _cordon(group, True, address, service)


@group_cli.command()
def uncordon(group: Group, address: Address = None, service: Name = None) -> None:
    """Let GROUP take work again; a drain that is under way is called off."""
    _cordon(group, False, address, service)


@group_cli.command()
def drain(group: Group, within: Within = 30.0, address: Address = None, service: Name = None) -> None:
    """Give GROUP nothing new and wait until nothing runs there; it stays cordoned."""
    _empty(group, within, False, address, service)


@group_cli.command()
def restart(group: Group, within: Within = 30.0, address: Address = None, service: Name = None) -> None:
    """Drain GROUP, build its ranks anew, and let it take work again."""
    _empty(group, within, True, address, service)


def _cordon(group: str, on: bool, address: str | None, service: str | None) -> None:
    from cluster.coordination.control import Cordon
    from deploy.panel import panel
    from deploy.service import ServiceError

    with said_plainly(ServiceError, ConnectionError), panel(address, service) as found:
        found.carry_out(Cordon(group, on))
    out.print(f"{group} {'gets nothing new' if on else 'takes work again'}")


def _empty(group: str, within_s: float, restart: bool, address: str | None, service: str | None) -> None:
    from cluster.coordination.control import Empty
    from deploy.panel import panel
    from deploy.service import ServiceError

    stages = Stages()
    with said_plainly(ServiceError, ConnectionError), stages, panel(address, service) as found:
        epochs = {row["group"]: row["epoch"] for row in found.status()["groups"]}
        stages(f"emptying {group}")
        found.carry_out(Empty(group, within_s, restart))
        patience = within_s + (RESTART_S if restart else ARRIVAL_S)
        word = found.await_group(group, epochs[group], restart=restart, within_s=patience)
    out.print(f"{group} is {word}")


def _show(changes: tuple[Change, ...]) -> None:
    if not changes:
        return out.print("nothing changes")
    table = plain_table("Changes", "key", "before", "after", "takes")
    for column in table.columns:
        column.justify = "left"
    for change in changes:
        table.add_row(change.key, str(change.before), str(change.after), change.reach.value)
    out.print(table)


def _conclude(revision: Any, changes: tuple[Change, ...], missing: list[str], as_json: bool) -> None:
    number, digest = revision.number, revision.edition.digest
    if as_json:
        plain = {"revision": number, "digest": digest, "changes": [change.plain for change in changes]}
        print(json.dumps(plain | {"missing": missing}))
    else:
        if changes:
            _show(changes)
        out.print(f"revision {number} ({digest}) is in force")
        for name in missing:
            out.print(f"not there yet: {name}", style="yellow", markup=False)
    if missing:
        raise typer.Exit(1)
