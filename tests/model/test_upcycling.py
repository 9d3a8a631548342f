"""Upcycled checkpoints against arithmetic written out, against transformers, and against our own model code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from deploy.catalog import fingerprint
from deploy.quality.perplexity import Passage, load_model, losses, losses_of
from deploy.upcycle import upcycling
from deploy.upcycle.kvheads import INDEX, POOLABLE, KVHeads, UpcyclingError
from deploy.upcycle.upcycling import pool, pooled, spread, upcycle
from tests.model.tiny import FAMILIES, Ranks, oracle, prompt, save_model
from workers.models.reading import read_native

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

HEADS = 6
_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "glm": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "llama": {"attention_bias": True},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "stablelm": {"use_qkv_bias": True},
}
KINDS = {name: name.removesuffix("ForCausalLM").lower() for name in POOLABLE}


def config_of(architecture: str, **changes: Any) -> Any:
    kind = KINDS[architecture]
    return AutoConfig.for_model(kind, **(_SHAPE | _OWN.get(kind, {}) | changes))


def exact(folder: Path) -> Any:
    """The model in `folder` in fp64: what is left of a difference then is no rounding."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain).eval()


def logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double()


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def make_heads_equal(model: Any, groups: int) -> None:
    """Copy the first KV head of each group over the others."""
    for name, parameter in model.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            size, dim = HEADS // groups, parameter.shape[0] // HEADS
            with torch.no_grad():
                for head in range(HEADS):
                    first = head // size * size
                    parameter[head * dim : (head + 1) * dim] = parameter[first * dim : (first + 1) * dim].clone()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """An MHA model with biases in several shards, and what else lies in a model folder."""
    folder = tmp_path / "mha"
    save_model(config_of("LlamaForCausalLM"), folder, shard_size="40KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model", "LICENSE"):
        (folder / name).write_text(f"{name} of the model")
    for name in ("tidegate.json", "README.md", "pytorch_model.bin", ".hidden.json"):
        (folder / name).write_text("not to be copied")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_pooling_is_what_a_loop_gives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    heads, dim = 6, 2
    for groups in (1, 2, 3, 6):
        found, size = pool(tensor, heads, groups), heads // groups
        expected = torch.zeros(groups * dim, *shape[1:], dtype=torch.float64)
        for group in range(groups):
            for row in range(dim):
                for member in range(size):
                    expected[group * dim + row] += tensor[(group * size + member) * dim + row].double() / size
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_equal_heads_is_the_head_to_the_bit(dtype: torch.dtype) -> None:
    few = torch.randn(3 * 4, 9, generator=torch.Generator().manual_seed(2)).to(dtype)
    for heads in (3, 6, 9, 15, 21, 33):
        assert torch.equal(pool(spread(few, 3, heads), heads, 3), few)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("architecture", POOLABLE)
def test_pooling_equal_heads_changes_nothing(tmp_path: Path, architecture: str, groups: int) -> None:
    model = save_model(config_of(architecture), tmp_path / "mha")
    make_heads_equal(model, groups)
    model.save_pretrained(tmp_path / "mha")
    after = upcycle(tmp_path / "mha", groups, tmp_path / "gqa")
    assert (after.kv_heads, after.q_heads, after.architecture) == (groups, HEADS, architecture)
    tokens = prompt(30)
    found, expected = (logits(exact(tmp_path / name), tokens) for name in ("gqa", "mha"))
    assert expected.std() > 0.01
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "PhiForCausalLM"])
def test_weights_and_biases_are_pooled_and_the_rest_is_kept(tmp_path: Path, architecture: str) -> None:
    save_model(config_of(architecture), tmp_path / "mha")
    upcycle(tmp_path / "mha", 2, tmp_path / "gqa")
    before, after = weights(tmp_path / "mha"), weights(tmp_path / "gqa")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "k_proj" in name or "v_proj" in name}
    assert {name.rpartition(".")[2] for name in changed} == {"weight", "bias"}
    for name in changed:
        heads = before[name].unflatten(0, (HEADS, -1))
        expected = torch.stack([(heads[0] + heads[1] + heads[2]) / 3, (heads[3] + heads[4] + heads[5]) / 3])
        torch.testing.assert_close(after[name], expected.flatten(0, 1))


def test_grouped_heads_are_pooled_further(tmp_path: Path) -> None:
    save_model(FAMILIES["smollm2"], tmp_path / "gqa")
    upcycle(tmp_path / "gqa", 1, tmp_path / "mqa")
    name = "model.layers.1.self_attn.v_proj.weight"
    before, after = weights(tmp_path / "gqa")[name], weights(tmp_path / "mqa")[name]
    torch.testing.assert_close(after, before.unflatten(0, (3, -1)).mean(0))


@pytest.mark.parametrize(("family", "target"), [("llama2", 2), ("llama2", 1), ("qwen2", 1), ("mistral", 1)])
def test_our_own_model_code_agrees_with_transformers(tmp_path: Path, family: str, target: int) -> None:
    save_model(FAMILIES[family], tmp_path / "before")
    upcycle(tmp_path / "before", target, tmp_path / "after")
    assert read_native(tmp_path / "after").kv_heads == target
    tokens, ranks = prompt(20), Ranks(tmp_path / "after")
    got = ranks.walk(tokens, [12, 1, 7], (4, 2, 0, 1, 3))
    ranks.close()
    theirs = oracle(AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32).eval(), tokens)
    assert (got - theirs[[11, 12, 19]]).abs().max() < 5e-5


def test_shards_keep_their_tensors_and_the_index_its_sum(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "gqa"
    upcycle(llama, 2, output)
    names = sorted(path.name for path in llama.glob("*.safetensors"))
    assert len(names) > 2 and sorted(path.name for path in output.glob("*.safetensors")) == names
    for name in names:
        with safe_open(llama / name, framework="pt") as old, safe_open(output / name, framework="pt") as new:
            assert set(old.keys()) == set(new.keys()) and old.metadata() == new.metadata()
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (llama, output))
    assert before["weight_map"] == after["weight_map"]
    assert after["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(output).values())
    single = tmp_path / "single"
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).save_pretrained(single)
    upcycle(single, 2, tmp_path / "gqa-single")
    ones = weights(tmp_path / "gqa-single")
    assert all(torch.equal(tensor, ones[name]) for name, tensor in weights(output).items())


def test_what_is_copied_and_what_is_not(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "gqa"
    output.mkdir()  # an empty folder is no obstacle
    upcycle(llama, 3, output)
    others = {path.name for path in output.iterdir() if path.suffix != ".safetensors"} - {INDEX}
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model", "LICENSE"}
    assert others == {"config.json", "generation_config.json", *copied}
    for name in copied:
        assert (output / name).read_text() == (llama / name).read_text()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llama, output))
    assert after == before | {"num_key_value_heads": 3}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in output.glob("*.safetensors"))
    assert fingerprint(output) != fingerprint(llama)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_stay_sixteen_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(config_of("LlamaForCausalLM"), tmp_path / "fp32").to(dtype).save_pretrained(tmp_path / "mha")
    heads = upcycle(tmp_path / "mha", 3, tmp_path / "gqa")
    assert {tensor.dtype for tensor in weights(tmp_path / "gqa").values()} == {dtype}
    assert heads.token_bytes() == 2 * 3 * 8 * 2 * 2


def test_upcycled_to_its_own_heads_a_model_is_the_same(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, HEADS, tmp_path / "same")
    before, after = weights(llama), weights(tmp_path / "same")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    passage = Passage(tuple(prompt(90)))
    assert losses_of(tmp_path / "same", passage) == losses_of(llama, passage)


@pytest.mark.parametrize(
    ("architecture", "dtype"), [*((name, torch.float32) for name in POOLABLE), ("LlamaForCausalLM", torch.bfloat16)]
)
def test_a_model_pooled_in_memory_is_the_one_that_is_written(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    folder, passage = tmp_path / "mha", Passage(tuple(prompt(60)))
    save_model(config_of(architecture), tmp_path / "fp32").to(dtype).save_pretrained(folder)
    model, heads = load_model(folder), KVHeads.read(folder)
    untouched = losses(model, passage)
    for target in (3, 1):
        upcycle(folder, target, tmp_path / str(target))
        written = losses_of(tmp_path / str(target), passage)
        with pooled(model, heads, target):
            found = losses(model, passage)
        assert found.values == pytest.approx(written.values, abs=2e-5)
        assert found.values != pytest.approx(untouched.values, abs=1e-2)
    assert losses(model, passage) == untouched


def test_a_model_that_names_its_weights_otherwise_is_refused(llama: Path, tmp_path: Path) -> None:
    heads, other = KVHeads.read(llama), torch.nn.Linear(2, 2)
    with pytest.raises(UpcyclingError, match="names the weights otherwise"), pooled(other, heads, 1):
        pass


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_nothing_is_left_when_writing_fails_midway(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    written: list[Path] = []
    save: Callable[..., None] = upcycling.save_file

    def failing(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if len(written) == 1:
            raise error
        written.append(path)
        save(tensors, path, metadata)

    monkeypatch.setattr(upcycling, "save_file", failing)
    with pytest.raises((UpcyclingError, KeyboardInterrupt)) as caught:
        upcycle(llama, 2, tmp_path / "gqa")
    assert written and list(tmp_path.iterdir()) == [llama]
    assert isinstance(caught.value, KeyboardInterrupt) or "gqa cannot be written: no space left" in str(caught.value)


def test_outputs_that_cannot_be_are_refused_and_left_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "mine").write_text("x")
    file.write_text("x")
    cases = {taken: "is not empty", llama: "is not empty", file: "is not a folder", tmp_path / "a" / "b": "not there"}
    for output, says in cases.items():
        with pytest.raises(UpcyclingError, match=says):
            upcycle(llama, 2, output)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(UpcyclingError, match="has 5 B free"):
        upcycle(llama, 2, tmp_path / "gqa")
    with pytest.raises(UpcyclingError, match="do not divide"):
        upcycle(llama, 4, tmp_path / "gqa")
    assert sorted(tmp_path.iterdir()) == sorted([file, llama, taken])
    assert [path.name for path in taken.iterdir()] == ["mine"]


def test_a_qk_norm_model_is_refused_whatever_it_is_called(tmp_path: Path) -> None:
    save_model(FAMILIES["qwen3"], tmp_path / "qwen3")
    with pytest.raises(UpcyclingError, match="QK-norm"):
        upcycle(tmp_path / "qwen3", 1, tmp_path / "out")
    path = tmp_path / "qwen3" / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM"))
    with pytest.raises(UpcyclingError, match=r"k_norm\.weight.*QK-norm"):
        upcycle(tmp_path / "qwen3", 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()
