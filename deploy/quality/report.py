"""What KV precisions cost, as a table in their measured order, and a searched map as it stands in a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.table import Table

from deploy.quality.examination import Mark
from deploy.quality.figures import Cost, Limits
from deploy.tables import plain_table

Row = Mapping[str, Any]


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The least harmful first; what the model cannot have last."""
    return sorted(rows, key=lambda row: row["cost"]["kl"]["mean"] if "cost" in row else float("inf"))


def verdict(row: Row, limits: Limits) -> list[str]:
    """What of a row is beyond `limits`: on the text, and in the last turn of the dialogue where there is one."""
    found = limits.faults(Cost.parse(row["cost"]))
    if row["turns"] and not row["turns"][-1]["mean"] <= limits.max_kl:
        kl = row["turns"][-1]["mean"]
        found.append(f"KL {kl:.4f} in turn {len(row['turns'])} is above max_kl {limits.max_kl:g}")
    return found


def costs_table(rows: Sequence[Row]) -> Table:
    """Rows of `deploy.quality.measurement`, in their order; ± is a standard error."""
    head = ("B/token", "tokens", "KL, nats", "top-1", "perplexity", "parts")
    table = plain_table("", "KV precision", *head)
    for row in rows:
        if "fault" in row:
            table.add_row(row["label"], *["-"] * len(head))
            continue
        cost = Cost.parse(row["cost"])
        parts = row["parted"]
        table.add_row(
            row["label"],
            f"{row['token_bytes']:,}",
            f"{row['capacity']:.2f}×",
            f"{cost.kl.mean:.4f}±{cost.kl.error:.4f}",
            f"{cost.top1.mean * 100:.1f}±{cost.top1.error * 100:.1f}%",
            f"{cost.rise.mean * 100:+.2f}±{cost.rise.error * 100:.2f}%",
            f"{parts['mean']:.0f}±{parts['error']:.0f}" if parts else "-",
        )
    return table


def turns_table(rows: Sequence[Row]) -> Table:
    """KL of each turn, a column per precision."""
    measured = [row for row in rows if row.get("turns")]
    table = plain_table("KL by turn, nats", "turn", *(row["label"] for row in measured))
    for number, turns in enumerate(zip(*(row["turns"] for row in measured), strict=True), 1):
        table.add_row(str(number), *(f"{turn['mean']:.4f}" for turn in turns))
    return table


def remarks(rows: Sequence[Row], limits: Limits) -> list[str]:
    """What the columns mean, the measured order, what passes, and why the others do not or cannot be had."""
    measured = [row for row in rows if "cost" in row]
    impossible = [f"{row['label']}: not possible: {row['fault']}" for row in rows if "fault" in row]
    if not measured:
        return impossible
    found = ["tokens: how many fit where one did; ± are standard errors, paired"]
    if parts := next((row["parted"] for row in measured if row["parted"]), None):
        found.append(f"parts: for how many of {parts['most']} tokens a greedy continuation stays the same")
    found.append("measured order: " + " < ".join(row["label"] for row in measured))
    within = [row["label"] for row in measured if not verdict(row, limits)]
    found.append(f"within the limits: {', '.join(within) or 'none'}")
    found += [f"{row['label']}: {'; '.join(verdict(row, limits))}" for row in measured if verdict(row, limits)]
    return found + impossible


def found_lines(found: Row) -> list[str]:
    """What a search gave: what was found, with its figures, and the lines for a config; or why nothing passes."""
    cost = Cost.parse(found["cost"]) if found["cost"] else None
    figures = f"{found['token_bytes']:,} bytes per token, {found['capacity']:.2f} × the capacity of unquantised"
    if cost:
        figures += (
            f"; KL {cost.kl.mean:.4f} ± {cost.kl.error:.4f}, top-1 {cost.top1.mean:.3f} ± {cost.top1.error:.3f}, "
            f"perplexity {cost.rise.mean:+.2%} ± {cost.rise.error:.2%} on {cost.tokens:,} tokens"
        )
    counts = f"{found['tried']} maps and {found['probed']} single layers were measured"
    if found["faults"]:
        title = f"nothing passes within the budget; the last that fits: {found['label']}"
        return [title, figures, *found["faults"], counts]
    return [figures, counts, "", *as_yaml({"kv_precision": found["precision"]}).splitlines()]


def marks_table(marks: Sequence[Mark]) -> Table:
    """A line per task."""
    table = plain_table("", "task", "asked", "right")
    for mark in marks:
        table.add_row(mark.task, str(mark.asked), f"{mark.right.mean * 100:.1f}±{mark.right.error * 100:.1f}%")
    return table


def as_yaml(plain: object) -> str:
    """As it would stand in a config."""
    text: str = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100)
    return text
