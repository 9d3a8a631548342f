"""GGUF files: converted once, found again by content, and as good as the model that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deploy.catalog import fingerprint, local_config, resolve
from deploy.config import Environment
from deploy.plan.command import shape_named
from deploy.staging import ModelError
from tests.model.tiny import Ranks, oracle, prompt, save_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

PROMPTS = ("a  12 = naïve", "x=1,000   99", "日本語 😀\n")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def quiet(text: str) -> None:
    """Progress that nobody looks at."""


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        bos_token_id=256,
        eos_token_id=257,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_model(config(), tmp_path_factory.mktemp("source"))


def vocabulary() -> list[str]:
    """All bytes, two control tokens, two merged ones."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "Ġa", "ab"]


def write(
    path: Path, model: Any, *, architecture: str = "llama", split: str = "llama-bpe", quantised: bool = False
) -> Path:
    """The weights of `model` as a GGUF file, in F32 or Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    shape = model.config
    writer.add_name("tiny")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(vocabulary())
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", shape.num_attention_heads), ("k_proj", shape.num_key_value_heads)):
            if part in name:  # llama.cpp's order of rotated pairs
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            translated(name), gguf.quantize(np.ascontiguousarray(values, np.float32), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def translated(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    return Environment(tmp_path / "cache")


def test_a_file_is_converted_once_and_computes_what_it_was_made_of(
    tmp_path: Path, model: Any, environment: Environment
) -> None:
    source = write(tmp_path / "tiny model.gguf", model)
    said: list[str] = []
    folder = resolve(str(source), None, said.append, environment)
    assert folder.parent == environment.cache / "models" and folder.name.startswith("tiny-model-")
    assert "converting: unpacking the weights to float32" in said
    found, made = load_file(folder / "model.safetensors"), model.state_dict()
    assert found.keys() == made.keys()
    assert all((found[name] == made[name]).all() for name in made)
    written = json.loads((folder / "config.json").read_text())
    assert (written["rms_norm_eps"], written["architectures"]) == (1e-5, ["LlamaForCausalLM"])
    ranks, tokens = Ranks(folder, 2), prompt(20, vocabulary=256)
    got = ranks.walk(tokens, [13, 6, 1], (5, 9, 7, 1, 3))
    ranks.close()
    assert (got - oracle(model, tokens)[[12, 18, 19]]).abs().max() < 5e-5
    assert shape_named(str(source)).elements.total == sum(each.numel() for each in model.parameters())
    said.clear()
    moved = source.rename(tmp_path / "tiny-model.gguf")
    assert resolve(str(moved), None, said.append, environment) == folder, "its name is alike and its content the same"
    assert resolve(str(moved), None, said.append, environment) == folder
    assert len(said) == 1 and said[0].startswith("reading"), "nothing was converted, and it was read once"
    with moved.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(0.25).tobytes())
    other = resolve(str(moved), None, said.append, environment)
    assert other != folder and fingerprint(other) != fingerprint(folder)


def test_quantised_weights_are_unpacked_to_bf16_and_text_is_split_as_the_file_says(
    tmp_path: Path, model: Any, environment: Environment
) -> None:
    source = write(tmp_path / "tiny.gguf", model, quantised=True)
    with pytest.raises(ModelError, match=r"is not converted yet: `python -m deploy\.catalog"):
        local_config(str(source))
    folder = resolve(str(source), None, quiet, environment)
    found = load_file(folder / "model.safetensors")
    for name, made in model.state_dict().items():
        assert str(found[name].dtype) == "torch.bfloat16"
        assert (found[name].float() - made).abs().max() < 0.02 * made.abs().max()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in PROMPTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert tokenizer.encode("ab a</s>", add_special_tokens=False).tokens == ["ab", "Ġa", "</s>"]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert (folder / "chat_template.jinja").is_file() or "chat_template" in settings


@pytest.mark.slow
def test_a_folder_with_one_file_is_that_file(tmp_path: Path, model: Any, environment: Environment) -> None:
    holder = tmp_path / "holder"
    holder.mkdir()
    write(holder / "tiny.gguf", model, split="nobody-knows")
    with pytest.raises(ModelError, match=r"tokenizer \(gpt2, nobody-knows\) .* tokenizer\.json .* beside it"):
        resolve(str(holder), None, quiet, environment)
    own = Tokenizer(BPE({piece: index for index, piece in enumerate(vocabulary())}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.save(str(holder / "tokenizer.json"))
    (holder / "config.json").write_text("{}")  # as some hubs' folders of GGUF files have
    folder = resolve(str(holder), None, quiet, environment)
    assert (folder / "tokenizer.json").read_bytes() == (holder / "tokenizer.json").read_bytes()
    write(holder / "other.gguf", model)
    with pytest.raises(ModelError, match=r"several GGUF files \(other\.gguf, tiny\.gguf\); name one"):
        resolve(str(holder), None, quiet, environment)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("command-r", "cannot unpack GGUF files of architecture 'command-r', only of bloom, .*llama"),
        ("mamba", "a model of architecture 'mamba' cannot be served: .* recurrent state"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, model: Any, environment: Environment, architecture: str, said: str
) -> None:
    source = write(tmp_path / "tiny.gguf", model, architecture=architecture)
    with pytest.raises(ModelError, match=rf"conversion of tiny\.gguf failed:\n.*{said}"):
        resolve(str(source), None, quiet, environment)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if not path.name.startswith(".")]


def test_a_part_and_a_file_that_is_none_are_told(tmp_path: Path, environment: Environment) -> None:
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="one part of a GGUF file in several; join them"):
        resolve(str(part), None, quiet, environment)
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"conversion of torn\.gguf failed"):
        resolve(str(torn), None, quiet, environment)
    with pytest.raises(ModelError, match="no hub id"):
        resolve(str(torn), "main", quiet, environment)


@pytest.mark.slow
def test_the_doctor_weighs_a_converted_file_and_its_name_is_without_the_ending(
    tmp_path: Path, model: Any, environment: Environment
) -> None:
    from deploy.config import ClusterConfig
    from deploy.survey import _needs

    source = write(tmp_path / "tiny.gguf", model)
    config = ClusterConfig(model=str(source))
    assert config.names == ("tiny",)
    (before,) = _needs(config, environment, 2)
    folder = resolve(str(source), None, quiet, environment)
    (after,) = _needs(config, environment, 2)
    assert (before.weights, after.weights) == (None, (folder / "model.safetensors").stat().st_size)
