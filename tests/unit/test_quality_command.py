"""`tidegate quality`: what a trial is asked, and how its figures are shown; and trials that go wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.quality import command
from deploy.quality.dialogue import ScriptError, digest, messages, prose
from deploy.quality.figures import Limits
from deploy.quality.job import Job
from deploy.quality.launch import TrialError, run_trial
from kvstore.precisions import PrecisionMap
from tests.unit.test_app import LLAMA
from workers.settings import GroupSettings

MIXED = {"k": "int8", "v": "int4"}
USUAL = [PrecisionMap.parse(each) for each in ("int8", "fp8_e4m3", "fp8_e5m2", MIXED, "int4")]


def estimate(mean: float, error: float = 0.001) -> dict[str, float]:
    return {"mean": mean, "error": error}


def costs(kl: float) -> dict[str, Any]:
    rise = estimate(kl / 2, 0.002)
    return {"kl": estimate(kl), "top1": estimate(1 - kl), "perplexity": 31.7, "rise": rise, "tokens": 1023}


class Trial:
    """Stands in for a trial: the n-th map costs 0.03 / n."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.faults: list[str] = []

    def __call__(self, job: Job, say: Callable[[str], None]) -> dict[str, Any]:
        self.jobs.append(job)
        plain = {"label": "bf16", "token_bytes": 1024}
        facts = {"tokens": job.context, "device": "cpu", "unquantised": plain}
        if job.limits:
            found = {
                "precision": {"default": "int4", "layers": {"1": MIXED}},
                "label": "int4 (0), …",
                "token_bytes": 300,
            }
            return facts | {
                "found": found | {"capacity": 3.4, "cost": costs(0.01), "faults": self.faults, "tried": 5, "probed": 2}
            }
        rows = []
        for number, precision in enumerate(job.maps, 1):
            row = {"label": precision.spelled(2), "precision": precision.plain}
            if row["label"] == "fp8_e5m2":
                rows.append(row | {"fault": "head_dim 3"})
                continue
            row |= {"kernels": "torch", "token_bytes": 544, "capacity": 1.88, "cost": costs(0.03 / number)}
            row |= {"turns": [estimate(0.001 * turn) for turn in range(1, job.turns + 1)]}
            rows.append(row | {"parted": {"mean": 12.0, "error": 3.0, "most": 64}})
        return facts | {"rows": rows}


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    stand_in = Trial()
    monkeypatch.setattr(command, "run_trial", stand_in)
    monkeypatch.setattr(command, "resolve", lambda model, revision, stages: Path(model))
    return stand_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def run(folder: Path, *options: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["quality", "--model", str(folder), *options])
    assert done.exit_code == code, done.output
    return done.output


def test_the_usual_precisions_are_measured_and_shown_in_measured_order(trial: Trial, folder: Path) -> None:
    shown = run(folder)
    (job,) = trial.jobs
    assert (list(job.maps), job.context, job.turns, job.greedy, job.limits) == (USUAL, 4096, 0, True, None)
    assert job.settings.model_dir == str(folder) and job.settings.device == "auto"
    assert "measured order: int4 < k int8 v int4 < fp8_e4m3 < int8" in shown
    assert "int8: KL 0.0300 is above max_kl 0.02" in shown and "fp8_e5m2: not possible: head_dim 3" in shown
    lines = [line.split() for line in shown.splitlines() if line.strip().startswith("int4 ")]
    assert lines[0] == ["int4", "544", "1.88×", "0.0060±0.0010", "99.4±0.1%", "+0.30±0.20%", "12±3"]
    assert "within the limits: int4, k int8 v int4, fp8_e4m3" in shown


def test_what_is_asked_for_is_measured_and_told_as_one_object(trial: Trial, folder: Path) -> None:
    options = ("--kv-precision", "int8", "--kv-precision", "{k: int8, v: int4}", "--context", "512", "--turns", "3")
    found = json.loads(run(folder, *options, "--json").splitlines()[-1])
    (job,) = trial.jobs
    assert [each.plain for each in job.maps] == ["int8", MIXED] and (job.context, job.turns) == (512, 3)
    assert [row["precision"] for row in found["rows"]] == ["int8", MIXED] and found["model"] == folder.name


def test_the_last_turn_counts(trial: Trial, folder: Path) -> None:
    assert "0.0210" not in run(folder, "--kv-precision", "int8", "--turns", "12")
    shown = run(folder, "--kv-precision", "int4", "--kv-precision", "int8", "--turns", "21")
    assert "int8: KL 0.0210 in turn 21 is above max_kl 0.02" in shown and "KL by turn" in shown


def test_a_configs_own_precision_and_limits_are_taken(trial: Trial, folder: Path) -> None:
    own = {"default": "int8", "layers": {"0": "bf16"}}
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder), "kv_precision": own, "quality": {"max_kl": 0.5}}))
    done = CliRunner().invoke(cli, ["quality", "--config", str(path)])
    assert done.exit_code == 0, done.output
    assert trial.jobs[0].maps == (*USUAL, PrecisionMap.parse(own))
    assert "above max_kl" not in done.output


def test_one_of_several_models_is_picked_by_name(trial: Trial, folder: Path) -> None:
    path = folder / "service.yaml"
    models = [{"model": str(folder), "served_model_names": name, "threads": n} for n, name in enumerate("ab", 1)]
    path.write_text(yaml.safe_dump({"models": models}))
    done = CliRunner().invoke(cli, ["quality", "--config", str(path), "--model", "b"])
    assert done.exit_code == 0 and trial.jobs[0].settings.threads == 2
    done = CliRunner().invoke(cli, ["quality", "--config", str(path)])
    assert done.exit_code == 1 and "several models, and one is wanted: a, b" in done.output


def test_a_searched_map_is_printed_as_it_stands_in_a_config(trial: Trial, folder: Path) -> None:
    shown = run(folder, "--search", "--budget-bytes-per-token", "400")
    (job,) = trial.jobs
    assert (job.limits, job.budget, job.maps, job.greedy) == (Limits(), 400, (), False)
    text = shown[shown.index("kv_precision:") :]
    assert yaml.safe_load(text) == {"kv_precision": {"default": "int4", "layers": {"1": MIXED}}}


def test_a_search_in_vain_exits_with_1(trial: Trial, folder: Path) -> None:
    trial.faults = ["KL 1.0 is above max_kl 0.02"]
    shown = run(folder, "--search", code=1)
    assert "nothing passes within the budget" in shown and "kv_precision:" not in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-precision", "int3"], "must be one of auto"),
        (["--kv-precision", "{k: int8"], "--kv-precision"),
        (["--search", "--turns", "3"], "leave --kv-precision and --turns out"),
        (["--budget-bytes-per-token", "9"], "goes with --search"),
    ],
)
def test_options_that_do_not_go_together_are_refused(trial: Trial, folder: Path, options: list[str], says: str) -> None:
    assert says in run(folder, *options, code=1)
    assert not trial.jobs


JOB = Job(
    GroupSettings("/nowhere", ("x",)), 1024, maps=(PrecisionMap.parse(MIXED),), limits=Limits(max_kl=0.5), budget=7
)


def test_a_job_survives_json() -> None:
    assert Job.parse(json.loads(json.dumps(JOB.plain))) == JOB


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_trial_is_heard_while_it_runs() -> None:
    said: list[str] = []
    lines = (
        "import json, sys",
        "print(json.dumps({'say': 'a'}))",
        "print(json.dumps({'result': json.load(sys.stdin)}))",
    )
    text = "\n".join(lines)
    assert Job.parse(run_trial(JOB, said.append, program(text))) == JOB
    assert said == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys, json; json.load(sys.stdin); print(json.dumps({'fault': 'no such layer'}))", "^no such layer$"),
        (
            "import sys; sys.stdin.read(); raise RuntimeError('out of memory')",
            "ended with status 1:(.|\n)*out of memory",
        ),
        ("import os; os.close(0); os._exit(3)", "ended with status 3"),
    ],
)
def test_a_trial_that_fails_says_why(text: str, says: str) -> None:
    with pytest.raises(TrialError, match=says):
        run_trial(JOB, print, program(text))


def test_the_real_program_says_what_is_wrong_with_a_model() -> None:
    with pytest.raises(TrialError, match=r"/nowhere has no config\.json"):
        run_trial(JOB, print)


def test_texts_come_along_and_have_an_identity() -> None:
    assert len(prose()) > 16_000 and len(digest()) == 16
    said = messages()
    assert [one["role"] for one in said] == ["user", "assistant"] * 12
    assert all(len(one["content"]) > 30 for one in said)


@pytest.mark.parametrize("text", ["", "user:\na\n", "assistant:\nb\n\nuser:\na\n", "user:\na\n\nuser:\nb\n"])
def test_a_dialogue_that_does_not_take_turns_is_refused(text: str) -> None:
    with pytest.raises(ScriptError):
        messages(text)
