"""`tidegate upcycle` as a person runs it: what it prints, what it writes, what it says no to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.quality.perplexity import Passage, losses_of
from deploy.upcycle.command import TEXT, TRAINING
from tests.model.tiny import save_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

runner = CliRunner()
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MHA model over bytes."""
    made = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    save_model(config, made)
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_text("Low water at four, and nobody on the beach. " * 6, encoding="utf-8")
    return path


def test_each_number_is_measured_and_shown(folder: Path, note: Path) -> None:
    options = ["upcycle", "--model", str(folder), "--kv-heads", "1,2,4,8", "--text", str(note)]
    done = runner.invoke(cli, options)
    assert done.exit_code == 0, done.output
    assert "8 query heads of 4, KV cache in fp32" in done.stdout
    for saved in ("0.0%", "50.0%", "75.0%", "87.5%"):
        assert saved in done.stdout
    assert "further training" in done.stdout
    found = json.loads(runner.invoke(cli, [*options, "--json"]).stdout)
    rows = found["rows"]
    assert [row["kv_heads"] for row in rows] == [8, 4, 2, 1]
    assert [row["token_bytes"] for row in rows] == [2 * heads * 4 * 4 * 2 for heads in (8, 4, 2, 1)]
    passage = Passage.read(folder, note.read_text())
    assert found["tokens"] == len(passage.tokens) - 1
    assert rows[0]["perplexity"] == pytest.approx(losses_of(folder, passage).perplexity)
    assert all(row["loss_error"] > 0 for row in rows[1:]) and found["note"] == TRAINING


def test_the_folder_written_costs_what_was_measured(folder: Path, note: Path, tmp_path: Path) -> None:
    asked = ["upcycle", "--model", str(folder), "--kv-heads", "2"]
    row = json.loads(runner.invoke(cli, [*asked, "--text", str(note), "--json"]).stdout)["rows"][1]
    output = tmp_path / "gqa"
    done = runner.invoke(cli, [*asked, "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert f"{output}: 2 KV heads instead of 8, 128 bytes of KV cache per token instead of 512" in done.stdout
    assert "(75.0% saved)" in done.stdout and "further training" in done.stdout
    passage = Passage.read(output, note.read_text())
    assert losses_of(output, passage).perplexity == pytest.approx(row["perplexity"], rel=1e-5)


def test_the_text_that_is_shipped_is_long_enough(folder: Path) -> None:
    words = TEXT.read_text(encoding="utf-8").split()
    assert len(words) > 1500


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-heads", "two"], "--kv-heads: expected numbers"),
        (["--kv-heads", "1,2", "--output", "new"], "one number goes with --output"),
        (["--kv-heads", "2", "--output", "new", "--text", "t"], "nothing is measured with --output"),
        (["--kv-heads", "2", "--text", "/nowhere.txt"], "--text: /nowhere.txt cannot be read"),
        (["--kv-heads", "2,3"], "3 KV heads: 8 heads do not divide"),
        (["--kv-heads", "16"], "the model has fewer already"),
    ],
)
def test_a_refusal_is_one_message(folder: Path, tmp_path: Path, options: list[str], says: str) -> None:
    given = [str(tmp_path / "new") if option == "new" else option for option in options]
    done = runner.invoke(cli, ["upcycle", "--model", str(folder), *given])
    assert done.exit_code == 1
    assert says in done.stderr and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_a_text_of_no_length_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    done = runner.invoke(cli, ["upcycle", "--model", str(folder), "--kv-heads", "2", "--text", str(empty)])
    assert done.exit_code == 1 and "too short to measure anything" in done.stderr
