"""The command `tidegate quality`: its options to a trial or an examination, and what came of it printed.

Loads no torch: trials run in a process of their own.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deploy.bench.command import api_key
from deploy.catalog import resolve
from deploy.config import ConfigError, Environment
from deploy.console import Stages
from deploy.quality import report
from deploy.quality.examination import examine
from deploy.quality.job import Job
from deploy.quality.launch import TrialError, run_trial
from deploy.quality.targets import pick, trial_settings
from deploy.quality.tasks import TaskError, read_task
from deploy.sections import ModelSection
from deploy.terminal import bar, out, said_plainly
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
    tasks: Annotated[
        list[str] | None, typer.Option(help="Ask a server instead: gsm8k=FILE humaneval=FILE mmlu=FILE.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="", help="Further tasks.", hidden=True)] = None,
    url: Annotated[str, typer.Option(help="With --tasks: an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    limit: Annotated[int | None, typer.Option(min=2, help="With --tasks: questions of each.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="With --tasks: examples before each question.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="With --tasks: file with the API key to use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what KV precisions cost the served model, against its unquantised cache; or find one that passes; or, with
    --tasks, how many questions with known answers a server gets right."""
    if tasks:
        with said_plainly(TaskError):
            _examine([*tasks, *(more or ())], url, model, limit, shots, api_key(key_file), as_json)
        return
    with said_plainly(TrialError), Stages() as stages:
        if more:
            raise ConfigError(f"{more[0]}: not understood; files of tasks stand behind --tasks")
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


def _examine(
    given: list[str],
    url: str,
    model: str | None,
    limit: int | None,
    shots: int | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Put the questions of files, each given as NAME=FILE, to the server at `url`, and print how many it got right."""
    read = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals:
            raise ConfigError(f"--tasks: write NAME=FILE, as in gsm8k=test.jsonl, got {text!r}")
        read.append(read_task(name, Path(path), limit=limit, shots=shots))
    with bar() as tick:
        marks = asyncio.run(examine(url, read, tick, model=model, key=key))
    if as_json:
        print(json.dumps({"url": url, "tasks": [asdict(mark) for mark in marks]}))
        return
    out.print(report.marks_table(marks))
    for mark in marks:
        if mark.failed:
            out.print(f"{mark.task}: {mark.failed} requests failed: {mark.error}", markup=False, soft_wrap=True)


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
        out.print(report.costs_table(rows))
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
