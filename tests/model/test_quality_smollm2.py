"""What KV precisions cost the real SmolLM2 on the texts that come along: promises about quality and capacity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.config import Environment
from deploy.machine import physical_cores
from deploy.quality.figures import Cost, Limits
from deploy.quality.job import Job
from deploy.quality.launch import run_trial
from deploy.quality.report import verdict
from deploy.settings import native_folder
from kvstore.precisions import PrecisionMap
from workers.settings import GroupSettings

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

CONTEXT = 4096
RECOMMENDED = {"k": "int8", "v": "int4"}


def settings(folder: Path) -> GroupSettings:
    """As `tidegate serve` runs it with defaults."""
    native = str(native_folder(Environment.read().cache))
    return GroupSettings(str(folder), ("smollm2-135m",), native_dir=native, threads=physical_cores())


@pytest.fixture(scope="module")
def rows(smollm2: Path) -> dict[str, dict[str, Any]]:
    maps = tuple(PrecisionMap.parse(each) for each in ("int8", "fp8_e4m3", RECOMMENDED, "int4"))
    found = run_trial(Job(settings(smollm2), CONTEXT, maps=maps), print)
    assert found["tokens"] == CONTEXT
    return {row["label"]: row for row in found["rows"]}


@pytest.mark.parametrize(
    ("label", "rise", "capacity"),
    [("int8", 0.005, 1.88), ("fp8_e4m3", 0.01, 1.88), ("k int8 v int4", 0.03, 2.3)],
)
def test_perplexity_and_capacity(rows: dict[str, dict[str, Any]], label: str, rise: float, capacity: float) -> None:
    row = rows[label]
    cost = Cost.parse(row["cost"])
    assert abs(cost.rise.mean) < rise
    assert row["capacity"] >= capacity
    assert cost.rise.error < rise / 2, "the promise is no chance"


def test_keys_by_channel_save_as_much_and_pass(smollm2: Path) -> None:
    """In blocks of 64, as the native kernels read them; each running sequence takes two blocks more."""
    job = Job(replace(settings(smollm2), block_size=64), CONTEXT, maps=(PrecisionMap.parse("int4_channel"),))
    (row,) = run_trial(job, print)["rows"]
    assert row["kernels"].startswith("native") and row["capacity"] >= 3.4
    assert Cost.parse(row["cost"]).rise.mean < 0.02 and not verdict(row, Limits())


def test_int4_alone_saves_most_and_does_not_pass(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["int4"]["capacity"] >= 3.4
    assert len(verdict(rows["int4"], Limits())) == 3, "or else keys in INT4 have become good: say so in the README"


def test_the_order_is_that_of_the_readme(rows: dict[str, dict[str, Any]]) -> None:
    by_kl = sorted(rows, key=lambda label: rows[label]["cost"]["kl"]["mean"])
    assert (by_kl[0], by_kl[-1]) == ("int8", "int4")


def test_a_search_finds_a_smaller_map_that_passes(smollm2: Path) -> None:
    found = run_trial(Job(settings(smollm2), 1024, limits=Limits()), lambda text: None)["found"]
    assert not found["faults"] and not Limits().faults(Cost.parse(found["cost"]))
    assert found["capacity"] > 2.46, "layers that bear keys in INT4 have them"
