"""The command `tidegate plan`: its options to a plan, and the plan printed. Downloads nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deploy.catalog import local_config
from deploy.config import ClusterConfig
from deploy.plan.modelconfig import read_shape
from deploy.plan.modeltable import find, unknown
from deploy.plan.planner import KV_PRECISIONS, WEIGHT_BYTES, Ask, Hardware, Plan, PlanError
from deploy.plan.report import document, lines
from deploy.plan.shapes import ModelShape
from deploy.sizes import parse_size
from deploy.staging import ModelError
from deploy.terminal import out, said_plainly
from workers.memory import machine_bytes

_MIB = 2**20
_LOUD = {"FITS": "green", "DOES NOT FIT": "bold red"}
_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def plan(
    model: Annotated[str, typer.Option(help="llama-3-70b and the like, a folder or config.json, or a local hub id.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of a group.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence (default: the model's).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once in a group.")] = 1,
    kv_precision: Annotated[str, typer.Option(help=f"auto, {', '.join(KV_PRECISIONS)}.")] = "auto",
    weights: Annotated[str, typer.Option(help=f"auto, {', '.join(WEIGHT_BYTES)}.")] = "auto",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs (default: this machine as it is).")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help='Memory of each GPU, as in "80GiB".')] = None,
    share: Annotated[float | None, typer.Option(help="Share of the memory to use (default: as the config's).")] = None,
    kv_memory: Annotated[str | None, typer.Option(help='KV pool of each rank, as in "72MiB".')] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = ClusterConfig().block_size,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per step (max_num_batched_tokens).")
    ] = ClusterConfig().max_num_batched_tokens,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="As if the model had so many KV heads.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="As if no layer saw more tokens.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model takes in memory, what fits, and what would; exit status 1 where it does not fit."""
    with said_plainly(PlanError):
        shape = _variant(shape_named(model, revision), kv_heads, window)
        precision = shape.dtype if weights == "auto" else weights
        ask = Ask(
            context=context or _whole_context(shape),
            batch=batch,
            ranks=tp,
            kv_precision=_cached(precision) if kv_precision == "auto" else kv_precision,
            weights=precision,
            block_size=block_size,
            step_tokens=step_tokens,
            kv_memory=None if kv_memory is None else _size("--kv-memory", kv_memory),
        )
        found = Plan(shape, hardware_of(gpus, gpu_memory, share), ask)
        if as_json:
            print(json.dumps(document(found)))
        else:
            _show(lines(found))
    if not found.fits:
        raise typer.Exit(1)


def shape_named(model: str, revision: str | None = None) -> ModelShape:
    """The shape of a path, of a hub id whose config.json is here, or of a name in the table. Raises ModelError."""
    known = find(model)
    if known and "/" not in model:
        return known
    try:
        path = local_config(model, revision)
    except ModelError:
        if known is None:
            raise
        return known
    if path is None:
        raise unknown(model)
    return read_shape(path, model if not Path(model).expanduser().exists() else path.resolve().parent.name)


def hardware_of(gpus: int | None, gpu_memory: str | None, share: float | None) -> Hardware:
    """What the options describe, else this machine: its GPUs where it has some. Raises PlanError."""
    if share is not None and not 0 < share <= 1:
        raise PlanError(f"--share must be above 0 and at most 1, got {share:g}")
    config = ClusterConfig()
    here = _gpus_here() if gpus is None or gpu_memory is None else []
    if gpus is None and gpu_memory is None and not here:
        return Hardware("cpu", 1, machine_bytes(), share or config.cpu_memory_utilization)
    if gpu_memory is None and not here:
        raise PlanError("--gpus needs --gpu-memory where this machine has no GPU: the memory of each, as in 80GiB")
    memory = min(here) if gpu_memory is None else _size("--gpu-memory", gpu_memory)
    return Hardware("gpu", gpus or len(here) or 1, memory, share or config.gpu_memory_utilization)


def _gpus_here() -> list[int]:
    """Bytes of each GPU's memory as the driver's own program says; [] without one. Loading torch would take seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run((program, *_QUERY), capture_output=True, text=True, timeout=20, check=True).stdout
        return [int(line) * _MIB for line in said.split()]
    return []


def _variant(shape: ModelShape, kv_heads: int | None, window: int | None) -> ModelShape:
    try:
        shape = shape.with_kv_heads(kv_heads) if kv_heads else shape
    except ValueError as error:
        raise PlanError(f"--kv-heads: {error}") from error
    return shape.with_window(window) if window else shape


def _cached(weights: str) -> str:
    """What a KV cache is kept in for such weights, when nothing is said."""
    return weights if weights in ("bf16", "fp16", "fp32") else "bf16"


def _whole_context(shape: ModelShape) -> int:
    if shape.context is None:
        raise PlanError(f"{shape.name} does not say how many tokens it reaches: give --context")
    return shape.context


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from error


def _show(rows: list[tuple[str, str]]) -> None:
    """Two columns; a heading is not repeated."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    last = ""
    for heading, text in rows:
        table.add_row("" if heading == last else heading, text, style=_LOUD.get(heading))
        last = heading or last
    out.print(table)
