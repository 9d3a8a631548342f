"""The gate before a start: which precisions are looked at, what follows, and that it is paid for once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.config import ClusterConfig, ConfigError, Environment, load
from deploy.quality import gate
from deploy.quality.figures import Limits
from deploy.quality.gate import admitted, code_digest
from deploy.quality.job import Job
from deploy.quality.launch import TrialError
from kvstore.precisions import PrecisionMap
from tests.unit.test_app import LLAMA

MIXED = {"k": "int8", "v": "int4"}


class Trials:
    """Stands in for trials: every precision costs `kl`."""

    def __init__(self, kl: float = 0.001, error: str = "", faults: tuple[str, ...] = ()) -> None:
        self.kl, self.error, self.faults = kl, error, faults
        self.jobs: list[Job] = []

    def __call__(self, job: Job, say: Callable[[str], None]) -> dict[str, Any]:
        self.jobs.append(job)
        say("halfway")
        if self.error:
            raise TrialError(self.error)
        estimate = {"mean": self.kl, "error": 0.0}
        cost = {
            "kl": estimate,
            "top1": {"mean": 1.0, "error": 0.0},
            "perplexity": 9.0,
            "rise": estimate,
            "tokens": 1023,
        }
        if job.limits is None:
            return {"tokens": 1024, "rows": [{"label": "x", "cost": cost, "turns": []} for _ in job.maps]}
        found = {"precision": MIXED, "label": "k int8 v int4", "cost": cost, "faults": list(self.faults)}
        return {"tokens": 1024, "found": found}


class Start:
    """A model folder, a cache folder and what was said."""

    def __init__(self, folder: Path) -> None:
        self.model, self.cache = folder / "model", folder / "cache"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(LLAMA))
        self.said: list[str] = []

    def config(self, **keys: Any) -> ClusterConfig:
        return ClusterConfig(model=str(self.model), **keys)

    def __call__(self, trials: Trials | None, **keys: Any) -> ClusterConfig:
        environment = Environment(self.cache)
        return admitted(self.config(**keys), [self.model], self.said.append, run=trials, environment=environment)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


@pytest.mark.parametrize(
    ("precision", "mode", "looked_at"),
    [
        ("auto", "auto", False),
        ("auto", "refuse", False),
        ("bf16", "warn", False),
        ("int8", "auto", False),
        ("fp8_e4m3", "auto", False),
        ("int8", "warn", True),
        ("fp8_e5m2", "refuse", True),
        ("int4", "auto", True),
        (MIXED, "auto", True),
        ({"default": "int8", "layers": {"1": "int4"}}, "auto", True),
        ("int4", "off", False),
    ],
)
def test_what_is_looked_at(start: Start, precision: object, mode: str, looked_at: bool) -> None:
    trials = Trials()
    config = start(trials, kv_precision=precision, quality={"gate": mode})
    assert len(trials.jobs) == looked_at
    assert config.kv_precision == PrecisionMap.parse(precision)
    if looked_at:
        (job,) = trials.jobs
        assert job.maps == (PrecisionMap.parse(precision),)
        assert (job.context, job.settings.tensor_parallel_size) == (1024, 1)
        assert start.said[-1].endswith(": halfway")


def test_a_precision_beyond_its_limits_is_refused_with_the_figures(start: Start) -> None:
    with pytest.raises(ConfigError) as refused:
        start(Trials(kl=0.5), kv_precision="int4")
    for part in ("kv_precision int4 costs model too much", "1,023 tokens", "KL 0.5000 is above max_kl 0.02", "50.0%"):
        assert part in str(refused.value)
    assert "tidegate quality --search" in str(refused.value) and "gate: off" in str(refused.value)


def test_limits_are_the_operators(start: Start) -> None:
    start(Trials(kl=0.5), kv_precision="int4", quality={"max_kl": 0.6, "max_perplexity_rise": 0.6})


def test_a_warning_does_not_stop_a_start(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=gate.log.name):
        start(Trials(kl=0.5), kv_precision="int8", quality={"gate": "warn"})
    assert "int8 costs model too much" in caplog.text
    with caplog.at_level(logging.WARNING, logger=gate.log.name):
        start(Trials(error="no torch"), kv_precision="fp8_e4m3", quality={"gate": "warn"})
    assert "could not be measured: no torch" in caplog.text


def test_what_cannot_be_measured_does_not_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="int4 of model could not be measured: no torch"):
        start(Trials(error="no torch"), kv_precision="int4")


def test_a_measurement_is_paid_for_once_and_judged_anew(start: Start) -> None:
    trials = Trials(kl=0.01)
    for _ in range(2):
        start(trials, kv_precision="int4")
    with pytest.raises(ConfigError):
        start(trials, kv_precision="int4", quality={"max_kl": 0.005})
    assert len(trials.jobs) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"kv_precision": MIXED},
        {"kv_precision": "int4", "quality": {"context": 512}},
        {"kv_precision": "int4", "kernels": "torch"},
        {"kv_precision": "int4", "dtype": "fp32"},
        {"kv_precision": "int4", "block_size": 64},
    ],
)
def test_what_the_figures_depend_on_is_measured_anew(start: Start, other: dict[str, Any]) -> None:
    trials = Trials()
    start(trials, kv_precision="int4")
    start(trials, **other)
    assert len(trials.jobs) == 1 + (other.get("block_size") is None), "blocks change no figure"


def test_other_weights_are_measured_anew(start: Start) -> None:
    trials = Trials()
    start(trials, kv_precision="int4")
    (start.model / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    start(trials, kv_precision="int4")
    assert len(trials.jobs) == 2


def test_a_kept_measurement_that_was_cut_short_is_made_again(start: Start) -> None:
    trials = Trials()
    start(trials, kv_precision="int4")
    (kept,) = (start.cache / "quality").iterdir()
    kept.write_text(kept.read_text()[:20])
    start(trials, kv_precision="int4")
    assert len(trials.jobs) == 2


def test_a_search_puts_its_map_into_the_config(start: Start) -> None:
    trials = Trials()
    search = {"search": True, "budget_bytes_per_token": 700, "max_kl": 0.03}
    for _ in range(2):
        assert start(trials, quality=search).kv_precision == PrecisionMap.parse(MIXED)
    (job,) = trials.jobs
    assert (job.limits, job.budget, job.maps) == (Limits(max_kl=0.03), 700, ())
    assert start.said[-1] == "found kv_precision of model, k int8 v int4"


def test_a_search_without_a_result_does_not_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="no kv_precision for model passes within its budget: too much"):
        start(Trials(faults=("too much",)), quality={"search": True})


def test_each_of_several_models_gets_its_own(start: Start) -> None:
    given = [{"model": str(start.model), "served_model_names": "a", "quality": {"search": True}}]
    given.append({"model": str(start.model), "served_model_names": "b", "kv_precision": "int8"})
    config = ClusterConfig.model_validate({"models": given})
    found = admitted(config, [start.model] * 2, print, run=Trials(), environment=Environment(start.cache))
    assert [section.kv_precision for section in found.models] == [PrecisionMap.parse(MIXED), PrecisionMap.parse("int8")]


def test_where_nothing_is_measured_only_what_is_known_counts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=gate.log.name):
        start(None, kv_precision="int4")
    assert "int4 of model has not been measured here" in caplog.text
    with pytest.raises(ConfigError, match="run `tidegate quality --search`"):
        start(None, quality={"search": True})
    start(Trials(), quality={"search": True})
    assert start(None, quality={"search": True}).kv_precision == PrecisionMap.parse(MIXED)
    with pytest.raises(ConfigError):
        start(Trials(kl=1.0), kv_precision=MIXED)
    with pytest.raises(ConfigError, match="costs model too much"):
        start(None, kv_precision=MIXED)


def test_the_code_that_computes_is_part_of_what_figures_depend_on(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    after = code_digest(tmp_path)
    (tmp_path / "b.h").write_text("")
    assert len({before, after, code_digest(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("quality: {gate: maybe}", [":1: quality.gate", "'auto', 'off', 'warn' or 'refuse'"]),
        ("quality:\n  max_lk: 1", [":2: quality.max_lk: unknown key; did you mean max_kl?"]),
        ("models:\n  - quality: {contxt: 300}", [":2: models.0.quality.contxt: unknown key; did you mean context?"]),
        ("quality: {context: 20}", ["quality.context", "129"]),
        ("quality: {budget_bytes_per_token: 9}", ["is for a search: set search: on beside it"]),
        ("kv_precision: int8\nquality: {search: on}", [":2: quality: search: on chooses kv_precision"]),
        ("quality: {min_top1: 1}", ["quality.min_top1", "less than 1"]),
    ],
)
def test_a_bad_quality_section_is_refused_by_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "service.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "service.yaml")
    assert all(part in str(refused.value) for part in parts), str(refused.value)


@pytest.mark.parametrize("text", ["quality: off", 'quality: "off"', "quality: {gate: off}"])
def test_off_is_understood_however_it_is_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.yaml").write_text(text + "\n")
    assert load(tmp_path / "service.yaml").quality.gate == "off"
