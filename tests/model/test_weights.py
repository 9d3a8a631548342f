"""Checkpoint: slices are what they say, and anything amiss in the files is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.tiny import FAMILIES, Ranks, prompt, save_model
from workers.weights import Checkpoint, WeightError

pytestmark = pytest.mark.model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(FAMILIES["smollm2"], tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_slices_are_rows_or_columns_of_the_whole(tmp_path: Path) -> None:
    whole = torch.randn(6, 10)
    save_file({"a": whole, "b": torch.arange(5).float()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("a", (6, 10), rows=(1, 4)), whole[1:4])
        assert torch.equal(checkpoint.take("a", (6, 10), columns=(3, 10)), whole[:, 3:])
        with pytest.raises(WeightError, match="b"):
            checkpoint.finish()
        assert torch.equal(checkpoint.take("b", (5,), rows=(2, 3)), torch.tensor([2.0]))
        checkpoint.finish()


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NAME), NAME + " is missing"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].t()}), NAME + " has shape"),
        (lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}), r"model\.layers\.9\.extra"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.float8_e4m3fn)}), NAME + " .*F8_E4M3"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int8)}), NAME + " .*I8"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_wrong_tensor_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str, world: int
) -> None:
    edit(folder, change)
    with pytest.raises(WeightError, match=message):
        Ranks(folder, world)


def test_rotary_frequencies_and_a_tied_head_in_the_file_are_ignored(folder: Path) -> None:
    expected = Ranks(folder).walk(prompt(5), [5], (0, 1))
    edit(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(101, 144)}
        ),
    )
    assert torch.equal(Ranks(folder).walk(prompt(5), [5], (0, 1)), expected)


def test_a_truncated_file_names_the_tensor_that_is_cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    path.write_bytes(content[:-1])
    with pytest.raises(WeightError, match=last):
        Ranks(folder)
    path.write_bytes(content[:20])
    with pytest.raises(WeightError, match="header"):
        Ranks(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin"):
        Ranks(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match="model-00001-of-00002"):
        Ranks(folder)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match="elsewhere"):
        Ranks(folder)
