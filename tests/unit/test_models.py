"""`tidegate models`: what is served and how, and what one model's KV cache is like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.models.command import spelled
from deploy.plan.modeltable import CONFIGS, MODELS, table_config
from kvstore.precisions import PrecisionMap
from workers.models.configs.families import FAMILIES
from workers.models.reading import parse_native

runner = CliRunner()


def told(*words: str) -> dict[str, Any]:
    done = runner.invoke(cli, ["models", *words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def said(*words: str) -> str:
    done = runner.invoke(cli, ["models", *words])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_without_a_model_all_families_are_listed() -> None:
    found = told()
    assert found["native"] == list(FAMILIES)
    assert any("mamba" in names and "jamba" in names for names in found["refused"].values())
    words = said()
    assert "native LlamaForCausalLM" in words and "generic any other decoder" in words and "ALiBi" in words


def test_a_native_model_of_the_table() -> None:
    found = told("smollm2-135m", "--kv-precision", "int8")
    (layers,) = found["layers"]
    assert (found["standing"], found["context"], found["token_bytes"]) == ("native", 8192, 30 * 408)
    assert (layers["kind"], layers["heads"], layers["kv_heads"], layers["ratio"]) == ("GQA", 9, 3, 3)
    assert layers["indices"] == list(range(30))
    assert "12,240 B over all layers in int8" in said("smollm2-135m", "--kv-precision", "int8")


def test_windows_and_soft_caps_by_layer() -> None:
    found = told("gemma-2-9b")
    windowed, full = found["layers"]
    assert (windowed["window"], full["window"], full["softcap"]) == (4096, None, 50)
    assert windowed["indices"] == list(range(0, 42, 2))
    assert found["token_bytes"] == 344_064
    assert "0, 2 … 40" in said("gemma-2-9b")


def test_a_map_of_precisions_by_layer() -> None:
    text = "{default: {k: int8, v: int4}, layers: {0-2: fp16, -3-: fp16}}"
    found = told("llama-3-70b", "--kv-precision", text)
    inner, outer = sorted(found["layers"], key=lambda part: part["key"], reverse=True)
    assert outer["indices"] == [0, 1, 2, 77, 78, 79] and (inner["key"], inner["value"]) == ("int8", "int4")
    precision = PrecisionMap.parse({"default": {"k": "int8", "v": "int4"}, "layers": {"0-2": "fp16", "-3-": "fp16"}})
    (layout,) = parse_native(table_config("llama-3-70b")).layout(32, precision, 1)
    assert found["token_bytes"] == layout.token_bytes


def folder(path: Path, **config: object) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_refused_model_says_why_and_its_sizes_where_they_are_known(tmp_path: Path) -> None:
    sizes = {**CONFIGS["llama-3-8b"], "model_type": "bloom"}
    found = told(folder(tmp_path, architectures=["BloomForCausalLM"], **sizes))
    assert found["standing"] == "refused" and "ALiBi" in found["why"]
    assert found["token_bytes"] == 131_072
    found = told(folder(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba", hidden_size=64))
    assert found["standing"] == "refused" and "recurrent state" in found["why"] and found["layers"] == []


def test_a_native_architecture_with_a_field_that_is_not_done_is_refused(tmp_path: Path) -> None:
    config = {**CONFIGS["llama-3-8b"], "architectures": ["LlamaForCausalLM"], "clip_qkv": 8}
    found = told(folder(tmp_path, **config))
    assert found["standing"] == "refused" and "clip_qkv" in found["why"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_has_a_card(name: str) -> None:
    found = told(name)
    assert found["architecture"].endswith("ForCausalLM") and found["token_bytes"] > 0
    assert found["standing"] == ("native" if found["architecture"] in FAMILIES else "refused")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "is no model of the table"),
        (["smollm2-135m", "--kv-precision", "int9"], "--kv-precision: must be one of auto, fp32"),
        (["smollm2-135m", "--kv-precision", "{layers: {0-99: int8}}"], "layers.0-99: the model has layers 0 to 29"),
        (["smollm2-135m", "--kv-precision", "{a: [}"], "--kv-precision: is not YAML"),
    ],
)
def test_what_cannot_be_answered_is_told(words: list[str], message: str) -> None:
    done = runner.invoke(cli, ["models", *words])
    assert done.exit_code == 1 and message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((3,), "3"),
        ((0, 1, 2), "0-2"),
        ((0, 2, 4, 6), "0, 2 … 6"),
        ((0, 1, 5), "0-1, 5"),
        ((0, 1, 3, 4, 6, 7), "0-1, 3-4, … (6)"),
    ],
)
def test_layers_in_few_words(indices: tuple[int, ...], words: str) -> None:
    assert spelled(indices) == words
