"""Figures and status as tables for people. Knows the values it prints, not where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from deploy.bench.figures import Figures, Spread
from deploy.sizes import format_size


def figures_table(figures: Sequence[Figures]) -> Table:
    """Four lines per server and level: rates on the first; p50, p90 and p99 in milliseconds of the time to the first
    token, per output token after it, between chunks, and of the whole request."""
    table = plain_table("Times in ms", "server", "load", "ok", "out tok/s", "req/s", "", "p50", "p90", "p99")
    table.columns[5].justify = "left"
    for row in figures:
        ok = f"{row.requests - row.failed}/{row.requests}"
        head = [row.server.removeprefix("http://"), row.level, ok, f"{row.output_tok_s:.1f}", f"{row.request_s:.2f}"]
        for name, spread in (("TTFT", row.ttft_ms), ("TPOT", row.tpot_ms), ("ITL", row.gap_ms)):
            table.add_row(*head, name, *_spread(spread))
            head = [""] * len(head)
        table.add_row(*head, "total", *_spread(row.total_ms), end_section=True)
    return table


def ratios(figures: Sequence[Figures]) -> list[str]:
    """For each level, how the first server's output rate compares with each other one's."""
    lines = []
    for level in dict.fromkeys(row.level for row in figures):
        first, *others = [row for row in figures if row.level == level]
        for other in others:
            if other.output_tok_s > 0:
                ratio = first.output_tok_s / other.output_tok_s
                lines.append(f"load {level}: {first.server} gives {ratio:.2f} × the output rate of {other.server}")
    return lines


def error_lines(figures: Sequence[Figures]) -> list[str]:
    """The most frequent errors, with their counts."""
    return [f"{row.server} at {row.level}: {count} × {text}" for row in figures for text, count in row.errors]


def _spread(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 3
    digits = 0 if spread.p99 >= 1000 else 1
    return [f"{value:.{digits}f}" for value in (spread.p50, spread.p90, spread.p99)]


def status_tables(found: Mapping[str, Any]) -> list[Table]:
    """Groups, ranks, models and waiting lines of a coordinator's status."""
    groups = found.get("groups", [])
    tables = [_groups_table(groups), _ranks_table(groups), _kv_table(groups), _models_table(found), line_table(found)]
    return [*tables, _settings_table(found)] if "revision" in found else tables


def plain_table(title: str, *columns: str) -> Table:
    """An empty table as all of ours look: the first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    return table


def _groups_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """Blocks of each pool by state, what runs and waits, cached sessions, and how old the news is."""
    blocks = ("blocks", "held", "cached", "free", "committed")
    head = ("group", "model", "state", "level", "epoch")
    table = plain_table("Groups", *head, *blocks, "running", "waiting", "sessions", "reported")
    for column in (1, 2, 3):
        table.columns[column].justify = "left"
    for group in sorted(groups, key=lambda group: (group["models"], group["group"])):
        pool = group["pool"] or {}
        table.add_row(
            group["group"],
            ", ".join(group["models"][:1]),
            group["state"],
            group.get("level", "-"),
            str(group["epoch"]),
            f"{group['blocks']} × {group['block_size']}",
            *(str(pool.get(key, "-")) for key in ("held", "idle", "free")),
            *(str(group[key]) for key in ("committed", "running", "waiting", "sessions")),
            f"{group['reported_s']:.1f} s",
        )
    return table


def _ranks_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """Each rank's process, device, threads and pool."""
    table = plain_table("Ranks", "group", "rank", "pid", "node", "device", "threads", "kernels", "KV pool")
    for group in groups:
        for rank in group["ranks"]:
            facts = (rank[key] for key in ("rank", "pid", "node", "device", "threads", "kernel"))
            table.add_row(group["group"], *map(str, facts), format_size(rank["pool_bytes"]))
    return table


def _kv_table(groups: Sequence[Mapping[str, Any]]) -> Table:
    """What each rank's pool keeps of a token."""
    table = plain_table("KV cache", "group", "rank", "a block", "a token's keys and values")
    table.columns[-1].justify = "left"
    for group in groups:
        for rank in group["ranks"]:
            table.add_row(group["group"], str(rank["rank"]), f"{rank['block_bytes']:,} B", rank["kv"])
    return table


def _models_table(found: Mapping[str, Any]) -> Table:
    """What is served, and what was refused."""
    table = plain_table("Models", "model", "groups up", "output tokens/s", "grants open", "given", "refused")
    grants, refused = dict(found.get("grants", {})), sum(found.get("refused", {}).values())
    given = grants.pop("given", 0)
    aliases = {name for group in found.get("groups", ()) for name in group["models"][1:]}
    for name, model in found.get("models", {}).items():
        if name in aliases:
            continue
        up, rate = f"{model['up']}/{model['groups']}", f"{model['drained_tokens_per_s']:.1f}"
        table.add_row(name, up, rate, str(sum(grants.values())), str(given), str(refused))
    return table


def _settings_table(found: Mapping[str, Any]) -> Table:
    """Which revision of the settings is in force, who goes by it, and what is under way with single groups."""
    current, words = found["revision"], found.get("maintenance", {})
    undone = ", again" if current["undone"] else ""
    table = plain_table(f"Settings: revision {current['number']} {current['digest']}{undone}", "who", "revision", "")
    table.columns[-1].justify = "left"
    for row in found.get("groups", ()):
        table.add_row(f"group {row['group']}", str(row.get("settings", "-")), words.get(row["group"], ""))
    for row in found.get("ingress_settings", ()):
        table.add_row(row["ingress"], str(row["revision"]), row["fault"])
    return table


def line_table(found: Mapping[str, Any]) -> Table:
    """Who waits, by model and class."""
    table = plain_table("Waiting line", "model", "class", "requests", "tokens", "oldest", "tenants")
    table.columns[1].justify = "left"
    for model, line in found.get("line", {}).items():
        for name, facts in line["classes"].items():
            waiting = (str(facts["waiting"]), str(facts["tokens"]), age(facts["oldest_s"]))
            table.add_row(model, name, *waiting, str(line["tenants"]))
    return table


def age(seconds: float | None) -> str:
    """Seconds for people: "12.5 s", "3 min 4 s"."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
