"""The command `tidegate upcycle`: writes a model with fewer KV heads, or shows what each number saves and costs.

Loads torch only once something is to be done; decides nothing about heads or losses itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from deploy.catalog import resolve
from deploy.config import ConfigError
from deploy.console import Stages
from deploy.tables import plain_table
from deploy.terminal import out, said_plainly
from deploy.upcycle.kvheads import KVHeads, UpcyclingError

TEXT = Path(__file__).resolve().parents[1] / "quality" / "texts" / "prose.txt"
"""What perplexity is measured on unless a file is given: prose of this project's own."""

TRAINING = (
    "Recovering what is lost takes further training of the written model (about 5 % of the original training in "
    "arXiv 2305.13245), which is out of scope here."
)


@dataclass(frozen=True, slots=True)
class Cost:
    """One number of KV heads: `token_bytes` of KV cache, the part of them that is `saved`, perplexity on the text;
    `loss` and its standard error `loss_error` are nats per token above the unchanged model, paired."""

    kv_heads: int
    token_bytes: int
    saved: float
    perplexity: float
    loss: float
    loss_error: float


def upcycle(
    model: Annotated[str, typer.Option(help="A local folder, smollm2-135m, or a hub id.")],
    kv_heads: Annotated[str, typer.Option(help="KV heads per layer; without --output several: 1,2,4,8.")],
    output: Annotated[Path | None, typer.Option(help="New folder to write; without it costs are measured.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to measure on (default: prose of our own).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Merge KV heads of a model into fewer by mean pooling; or, without --output, show what that saves and costs."""
    with said_plainly(UpcyclingError), Stages() as stages:
        targets = _numbers(kv_heads)
        if output is not None and len(targets) > 1:
            raise ConfigError("--kv-heads: one number goes with --output; leave --output out to compare several")
        if output is not None and text is not None:
            raise ConfigError("--text: nothing is measured with --output; leave one of the two out")
        prose = None if output is not None else _prose(text or TEXT)
        folder = resolve(model, None, stages)
        heads = KVHeads.read(folder)
        for target in targets:
            heads.check(target)
        if prose is None:
            assert output is not None
            found = _written(folder, heads, targets[0], output.expanduser(), stages)
        else:
            found = _measured(folder, heads, targets, prose, stages)
    if as_json:
        print(json.dumps(found))
        return
    out.print(found["title"], markup=False, soft_wrap=True)
    if output is None:
        out.print(costs_table(found["rows"]))
    out.print(TRAINING, style="dim", markup=False)


def costs(folder: Path, heads: KVHeads, targets: Sequence[int], text: str, stages: Stages) -> tuple[int, list[Cost]]:
    """How many tokens of `text` were scored, and a row for the model as it is and for each of `targets`.

    Raises UpcyclingError for a number that cannot be, and for a text or model that nothing can be measured with.
    """
    stages("loading torch and the model")
    from deploy.quality import perplexity
    from deploy.upcycle.upcycling import pooled

    try:
        model, passage = perplexity.load_model(folder), perplexity.Passage.read(folder, text)
        stages(f"measuring: {heads.kv_heads} KV heads, as it is")
        before = perplexity.losses(model, passage)
        rows = [Cost(heads.kv_heads, heads.token_bytes(), 0.0, before.perplexity, 0.0, 0.0)]
        for target in sorted(set(targets) - {heads.kv_heads}, reverse=True):
            stages(f"measuring: {target} KV heads")
            with pooled(model, heads, target):
                after = perplexity.losses(model, passage)
            size, above = heads.token_bytes(target), after.above(before)
            saved = 1 - size / heads.token_bytes()
            rows.append(Cost(target, size, saved, after.perplexity, above.mean, above.error))
    except perplexity.PassageError as error:
        raise UpcyclingError(str(error)) from error
    return len(before.values), rows


def costs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Costs as plain values, for people; the first row is the model as it is."""
    table = plain_table("", "KV heads", "KV bytes/token", "saved", "perplexity", "loss, nats/token")
    for number, row in enumerate(rows):
        loss = f"{row['loss']:+.3f} ± {row['loss_error']:.3f}" if number else "as it is"
        perplexity = f"{row['perplexity']:,.{2 if row['perplexity'] < 1000 else 0}f}"
        table.add_row(str(row["kv_heads"]), f"{row['token_bytes']:,}", f"{row['saved']:.1%}", perplexity, loss)
    return table


def _measured(folder: Path, heads: KVHeads, targets: Sequence[int], text: str, stages: Stages) -> dict[str, Any]:
    tokens, rows = costs(folder, heads, targets, text, stages)
    title = f"{_about(folder, heads)}; measured on {tokens:,} tokens in fp32"
    return {"title": title, "tokens": tokens, "rows": [asdict(row) for row in rows], "note": TRAINING}


def _written(folder: Path, heads: KVHeads, target: int, output: Path, stages: Stages) -> dict[str, Any]:
    stages("loading torch")
    from deploy.upcycle import upcycling

    after = upcycling.upcycle(folder, target, output, stages)
    saved = 1 - after.token_bytes() / heads.token_bytes()
    title = (
        f"{output}: {after.kv_heads} KV heads instead of {heads.kv_heads}, {after.token_bytes():,} bytes of KV cache "
        f"per token instead of {heads.token_bytes():,} ({saved:.1%} saved)"
    )
    size = {"before": heads.token_bytes(), "after": after.token_bytes()}
    return {"title": title, "output": str(output), "token_bytes": size, "note": TRAINING}


def _about(folder: Path, heads: KVHeads) -> str:
    return (
        f"{folder.name}: {heads.layers} layers, {heads.q_heads} query heads of {heads.head_dim}, "
        f"KV cache in {heads.precision.label}"
    )


def _numbers(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]. Whether they fit a model is for KVHeads to say."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f'--kv-heads: expected numbers like "4" or "1,2,4,8", got {text!r}') from None


def _prose(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path} cannot be read: {error}") from error
