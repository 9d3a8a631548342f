"""Checkpoint: slices are what they say, and anything amiss in the files is an error that names it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.layout import Precision
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


def blockwise(whole: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and the scale of each block, as DeepSeek-V3's checkpoints have them: block by block, by hand."""
    height, width = block
    values = torch.empty(whole.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-whole.shape[0] // height), -(-whole.shape[1] // width))
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            place = slice(down * height, (down + 1) * height), slice(across * width, (across + 1) * width)
            scales[down, across] = whole[place].abs().max() / 448
            values[place] = (whole[place] / scales[down, across]).to(torch.float8_e4m3fn)
    return values, scales


def test_fp8_with_a_scale_per_block_is_multiplied_out_slice_by_slice(tmp_path: Path) -> None:
    whole = torch.randn(300, 330) * torch.logspace(-3, 3, 330)  # blocks of very different sizes
    values, scales = blockwise(whole, (128, 128))
    save_file({"a": values, "a_scale_inv": scales, "b": torch.ones(3)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, fp8_block=(128, 128)) as checkpoint:
        got = checkpoint.take("a", (300, 330))
        assert got.dtype == torch.float32
        largest = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :330] * 448
        assert ((got - whole).abs() <= torch.maximum(whole.abs() / 16, largest / 448 / 512)).all()
        assert (got - whole).abs().max() > 0
        for first, last in ((0, 300), (0, 128), (1, 129), (130, 140), (255, 300), (299, 300)):
            assert torch.equal(checkpoint.take("a", (300, 330), rows=(first, last)), got[first:last])
            assert torch.equal(checkpoint.take("a", (300, 330), columns=(first, last)), got[:, first:last])
        assert torch.equal(checkpoint.take("b", (3,)), torch.ones(3))
        checkpoint.finish()
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"a of .* is FP8 .*weight_block_size"):
        checkpoint.take("a", (300, 330))
    with (
        Checkpoint(tmp_path, fp8_block=(64, 128)) as checkpoint,
        pytest.raises(WeightError, match="a_scale_inv has shape"),
    ):
        checkpoint.take("a", (300, 330))


def test_what_lies_under_a_prefix_can_be_left_unread(tmp_path: Path) -> None:
    save_file({"a.1.x": torch.ones(3), "a.1.y": torch.ones(3), "a.12.x": torch.ones(3)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert "a.1.y" in checkpoint and "a.2.y" not in checkpoint
        checkpoint.skip_under("a.1.")
        with pytest.raises(WeightError, match=r"does not use: a\.12\.x$"):
            checkpoint.finish()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["torch", "onednn", "native"])
def test_nothing_of_the_files_stays_mapped_once_a_model_is_loaded(folder: Path, kernels: str, dtype: str) -> None:
    if kernels == "native":
        options = {"dtype": "bf16", "precision": Precision.BF16, "block_size": 16}
    else:
        options = {"dtype": dtype}
    ranks = Ranks(folder, 2, kernels=kernels, **options)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_values_may_lie_at_any_byte_of_the_file(tmp_path: Path, spare: int, dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    path = tmp_path / "model.safetensors"
    save_file({"a": whole}, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * spare
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.take("a", (6, 10)), whole)
        assert torch.equal(checkpoint.take("a", (6, 10), columns=(1, 4)), whole[:, 1:4])


@pytest.mark.parametrize("offsets", [[0, 236], [4, 240], [-8, 232], [240, 0]])
def test_offsets_that_do_not_fit_the_shape_name_the_tensor(tmp_path: Path, offsets: list[int]) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [6, 10], "data_offsets": offsets}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(240))
    with pytest.raises(WeightError, match="tensor a"), Checkpoint(tmp_path) as checkpoint:
        checkpoint.take("a", (6, 10))


def test_what_is_done_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.take("a", (4,)).zero_()
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.take("a", (4,)).sum() == 4


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


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_the_names_of_older_checkpoints_are_read_too(tmp_path: Path, family: str) -> None:
    """GPT-2's own files leave out the root, and both families' have masks among the weights of a layer."""
    save_model(FAMILIES[family], tmp_path)
    tokens = prompt(11)
    expected = Ranks(tmp_path).walk(tokens, [11], (5, 9, 7))

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.").replace("lm_head.", "embed_out.")] = tensors.pop(name)
        layer, attention = ("h", "attn") if family == "gpt2" else ("gpt_neox.layers", "attention")
        for index in range(3):
            tensors[f"{layer}.{index}.{attention}.bias"] = torch.ones(1, 1, 4, 4)

    edit(tmp_path, age)
    assert torch.equal(Ranks(tmp_path).walk(tokens, [11], (5, 9, 7)), expected)
