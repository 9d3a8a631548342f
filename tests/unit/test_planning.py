"""The command `tidegate plan`: where shapes come from, what hardware is meant, what is printed and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import catalog
from deploy.__main__ import cli
from deploy.plan import command as planning
from deploy.plan.command import hardware_of, shape_named
from deploy.plan.modeltable import CONFIGS
from deploy.plan.planner import PlanError
from deploy.staging import ModelError

runner = CliRunner()
GPUS = ["--gpus", "8", "--gpu-memory", "80GiB"]
ASKED = ["plan", "--model", "llama-3-70b", "--tp", "8", "--context", "131072", "--batch", "4"]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_gpus_here", lambda: [])
    monkeypatch.setattr(planning, "machine_bytes", lambda: 24 * 2**30)


def folder(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"]))
    return path


def test_a_plan_that_fits() -> None:
    done = runner.invoke(cli, [*ASKED, *GPUS])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    for words in ("141.11 GB = 131.42 GiB", "4,096 B", "171.80 GB = 160.00 GiB", "FITS", "parallelism"):
        assert words in said, done.output


def test_one_that_does_not_exits_with_1_and_says_what_would() -> None:
    done = runner.invoke(cli, ASKED)
    assert done.exit_code == 1
    assert "DOES NOT FIT" in done.output and "would fit" in done.output


def test_json_is_one_object() -> None:
    done = runner.invoke(cli, [*ASKED, *GPUS, "--kv-precision", "int4", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["settings"]["kv_precision"] == "int4"
    assert found["kv"]["token_bytes"] == 80 * 2 * 8 * (64 + 4)
    assert found["hardware"]["devices"] == 8


def test_variants() -> None:
    done = runner.invoke(cli, [*ASKED, *GPUS, "--kv-heads", "1", "--window", "4096", "--json"])
    assert json.loads(done.output)["kv"]["total_bytes"] == 4 * 4096 * 40_960


def test_shapes_from_folders_files_and_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = folder(tmp_path)
    assert shape_named(str(here)).layers == shape_named(str(here / "config.json")).layers
    assert len(shape_named(str(here)).layers) == 36
    known = {"org/tiny": str(here / "config.json")}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, *_, **__: known.get(model))
    assert shape_named("org/tiny").hidden == 4096
    assert shape_named("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"
    with pytest.raises(ModelError, match=r"hf download org/other config\.json"):
        shape_named("org/other")
    with pytest.raises(ModelError, match="table"):
        shape_named("lama")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="not a model folder"):
        shape_named(str(tmp_path / "empty"))
    assert catalog.local_config("no-path-and-no-id") is None


def test_hardware() -> None:
    here = hardware_of(None, None, None)
    assert (here.kind, here.share, here.budget(2)) == ("cpu", 0.25, 3 * 2**30)
    gpus = hardware_of(4, "80GiB", None)
    assert (gpus.kind, gpus.devices, gpus.budget(2)) == ("gpu", 4, int(80 * 2**30 * 0.9))
    assert hardware_of(None, "24GiB", 0.5).devices == 1


def test_this_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_gpus_here", lambda: [80 * 2**30, 40 * 2**30])
    assert hardware_of(None, None, None).devices == 2
    assert hardware_of(1, None, None).device_bytes == 40 * 2**30


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--gpus", "8"], "--gpu-memory"),
        (["--gpus", "8", "--gpu-memory", "80"], "unit"),
        (["--share", "1.5"], "--share"),
        (["--kv-precision", "int3"], "int4"),
        (["--weights", "q4"], "bf16"),
        (["--kv-heads", "7"], "--kv-heads"),
    ],
)
def test_refusals_say_what_to_change(more: list[str], word: str) -> None:
    done = runner.invoke(cli, [*ASKED, *more])
    assert done.exit_code == 1
    assert word in done.output
    with pytest.raises(PlanError):
        hardware_of(8, None, None)


def test_a_folder_and_the_table_give_the_same_shape(tmp_path: Path) -> None:
    served = folder(tmp_path)
    (served / "config.json").write_text(json.dumps(CONFIGS["smollm2-135m"] | {"dtype": "bfloat16"}))
    found = shape_named(str(served))
    assert found.name == tmp_path.name
    assert found.layers == shape_named("smollm2-135m").layers
