"""The command `tidegate models`: what is native, what is generic and what is refused; or one model's card. Loads
transformers only for a model that is not native, and downloads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from deploy.models.card import GENERIC, NATIVE, Card, Layers, card_of
from deploy.tables import plain_table
from deploy.terminal import out, said_plainly
from kvstore.precisions import PrecisionError, PrecisionMap
from workers.models.configs.families import FAMILIES
from workers.models.refusals import REASONS

_GENERIC = (
    "any other decoder of the installed transformers whose layers attend through its attention interface: computed by "
    "transformers' modules on one rank, and compared with the plain model before it serves"
)
_RUNS = 2
"""Runs of layers that are written out."""
_COLOURS = {NATIVE: "green", GENERIC: "yellow"}


def models(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, config.json, converted GGUF file, local hub id, or llama-3-70b and the like."),
    ] = None,
    kv_precision: Annotated[str, typer.Option(help="As in the config: int8, or {k: int8, v: int4}.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of the hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which models are served and how; of MODEL also what its attention and its KV cache are like."""
    with said_plainly(PrecisionError):
        if model is None:
            _say(overview(), as_json, _overview_table)
            return
        card = card_of(model, _precision(kv_precision), revision)
        if as_json:
            print(json.dumps(card.plain))
        else:
            _show(card)


def overview() -> dict[str, Any]:
    """What is native, generic and refused, as JSON has it."""
    refused: dict[str, list[str]] = {}
    for family, why in sorted(REASONS.items()):
        refused.setdefault(why, []).append(family)
    return {"native": list(FAMILIES), "generic": _GENERIC, "refused": refused}


def _precision(text: str) -> PrecisionMap:
    """The map that `text` says, in YAML. PrecisionError for another."""
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PrecisionError("--kv-precision", f"is not YAML: {' '.join(str(error).split())}") from error
    try:
        return PrecisionMap.parse(given)
    except PrecisionError as error:
        raise PrecisionError(".".join(part for part in ("--kv-precision", error.key) if part), error.message) from error


def _say(document: Mapping[str, Any], as_json: bool, table: Any) -> None:
    if as_json:
        print(json.dumps(document))
    else:
        out.print(table(document))


def _overview_table(document: Mapping[str, Any]) -> Table:
    table = _grid()
    table.add_row(Text("native", "green"), ", ".join(document["native"]))
    table.add_row(Text("generic", "yellow"), document["generic"])
    for why, families in document["refused"].items():
        table.add_row(Text("refused", "red"), f"{', '.join(families)}: {why}")
    return table


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def _show(card: Card) -> None:
    table = _grid()
    table.add_row("model", f"{card.model}: {card.architecture}")
    table.add_row(Text(card.standing, _COLOURS.get(card.standing, "red")), card.why)
    if card.context:
        table.add_row("context", f"{card.context:,} tokens")
    if card.layers:
        table.add_row("KV, token", f"{card.token_bytes:,} B over all layers in {card.precision}")
    out.print(table)
    if card.layers:
        out.print(_layer_table(card.layers))


def _layer_table(layers: tuple[Layers, ...]) -> Table:
    table = plain_table("", "layers", "kind", "heads", "KV", "ratio", "dim", "window", "cap", "KV in", "B/token")
    for part in layers:
        table.add_row(
            spelled(part.indices),
            part.kind,
            str(part.heads),
            str(part.kv_heads),
            str(part.ratio),
            str(part.head_dim),
            "all" if part.window is None else f"{part.window:,}",
            "-" if part.softcap is None else f"{part.softcap:g}",
            part.key if part.key == part.value else f"k {part.key} v {part.value}",
            f"{part.token_bytes:,}",
        )
    return table


def spelled(indices: tuple[int, ...]) -> str:
    """Rising numbers in few words: "0-29", "0, 2 … 40", or "0-4, 6-10, … (22)"."""
    steps = {after - before for before, after in pairwise(indices)}
    if len(steps) == 1 and steps != {1} and len(indices) > 3:
        return f"{indices[0]}, {indices[1]} … {indices[-1]}"
    starts = [index for index in indices if index - 1 not in indices]
    ends = [index for index in indices if index + 1 not in indices]
    runs = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return ", ".join(runs) if len(runs) <= _RUNS else f"{', '.join(runs[:_RUNS])}, … ({len(indices)})"
