"""The command `tidegate quality`: its options to a trial or an examination, and what came of it printed.

Loads no torch: trials run in a process of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deploy.catalog import resolve
from deploy.config import ConfigError, Environment
from deploy.console import Stages
from deploy.quality import report
from deploy.quality.job import Job
from deploy.quality.launch import TrialError, run_trial
from deploy.quality.targets import pick, trial_settings
from deploy.sections import ModelSection
from deploy.terminal import out, said_plainly
from kvstore.precisions import AUTOMATIC, PrecisionError, PrecisionMap

USUAL: tuple[object, ...] = ("int8", "fp8_e4m3", "fp8_e5m2", {"k": "int8", "v": "int4"}, "int4")
"""What is measured unless something is asked for."""


def quality(
    kv_precision: Annotated[
        list[str] | None, typer.Option(help='int8, or "{k: int8, v: int4}", as in a config; several times.')
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file: the model, its kernels, the limits.")] = None,
    model: Annotated[str | None, typer.Option(help="smollm2-135m, a local folder, or a hub id.")] = None,
    context: Annotated[int, typer.Option(min=130, help="Tokens of the text that comes along.")] = 4096,
    turns: Annotated[int, typer.Option(min=0, help="Turns of a dialogue whose KV cache is kept: up to 12.")] = 0,
    search: Annotated[bool, typer.Option("--search", help="Find the most compact map by layer that passes.")] = False,
    budget_bytes_per_token: Annotated[int | None, typer.Option(min=1, help="With --search: at most so much.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what KV precisions cost the served model, against its unquantised cache; or find one that passes."""
    with said_plainly(TrialError), Stages() as stages:
        if budget_bytes_per_token is not None and not search:
            raise ConfigError("--budget-bytes-per-token: goes with --search")
        if search and (kv_precision or turns):
            raise ConfigError("--search: chooses precisions itself, on the text; leave --kv-precision and --turns out")
        whole, section = pick(config, model)
        maps = () if search else _maps(kv_precision, section)
        folder = resolve(section.model, section.revision, stages)
        job = Job(
            trial_settings(whole, section, folder, Environment.read()),
            context=context,
            maps=maps,
            turns=turns,
            greedy=not search,
            limits=section.quality.limits() if search else None,
            budget=budget_bytes_per_token or section.quality.budget_bytes_per_token,
        )
        found = {"model": section.names[0], **run_trial(job, stages)}
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, section)
    if search and found["found"]["faults"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any], section: ModelSection) -> None:
    plain = found["unquantised"]
    out.print(
        f"{found['model']} on {found['device']}: {found['tokens']:,} tokens of text, against {plain['label']} "
        f"({plain['token_bytes']:,} bytes per token)",
        markup=False,
        soft_wrap=True,
    )
    if "found" in found:
        lines = report.found_lines(found["found"])
    else:
        limits, rows = section.quality.limits(), report.ordered(found["rows"])
        out.print(report.costs_table(rows, limits))
        if any(row.get("turns") for row in rows):
            out.print(report.turns_table(rows))
        lines = report.remarks(rows, limits)
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def _maps(given: list[str] | None, section: ModelSection) -> tuple[PrecisionMap, ...]:
    """What was asked for; else the usual ones, and the section's own where it is another."""
    if given:
        return tuple(_parsed(text) for text in given)
    usual = tuple(PrecisionMap.parse(each) for each in USUAL)
    own = section.kv_precision
    return usual if own == AUTOMATIC or own in usual else (*usual, own)


def _parsed(text: str) -> PrecisionMap:
    try:
        return PrecisionMap.parse(yaml.safe_load(text))
    except (PrecisionError, yaml.YAMLError) as error:
        raise ConfigError(f"--kv-precision: {text}: {error}") from error
