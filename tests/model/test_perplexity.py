"""Losses per token against their definition, and windows that score each token once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from deploy.quality.perplexity import Estimate, Losses, Passage, PassageError, load_model, losses
from tests.model.tiny import FAMILIES, oracle, prompt, save_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(FAMILIES["llama3"], made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder)


def by_hand(model: Any, ids: list[int], first: int) -> list[float]:
    """-log p of ids[first:], each after all that stands before it in `ids`."""
    probabilities = oracle(model, ids).double().softmax(-1)
    return [-math.log(probabilities[at - 1, ids[at]]) for at in range(first, len(ids))]


def test_a_text_within_the_window_is_scored_in_one(model: Any) -> None:
    tokens = prompt(50)
    assert losses(model, Passage(tuple(tokens))).values == pytest.approx(by_hand(model, tokens, 1), abs=1e-5)


def test_a_lead_is_seen_and_not_scored(model: Any) -> None:
    tokens = prompt(20)
    found = losses(model, Passage(tuple(tokens), lead=(1, 5)))
    assert found.values == pytest.approx(by_hand(model, [1, 5, *tokens], 2), abs=1e-5)


@pytest.mark.parametrize("lead", [(), (1,)])
@pytest.mark.parametrize("count", [15, 16, 17, 23, 24, 25, 64])
def test_windows_overlap_by_half_and_score_each_token_once(model: Any, count: int, lead: tuple[int, ...]) -> None:
    tokens, window = prompt(count), 16 + len(lead)
    found = losses(model, Passage(tuple(tokens), lead), window=window).values
    expected = by_hand(model, [*lead, *tokens[:16]], 1)
    for start in range(8, count - 8, 8):
        expected += by_hand(model, [*lead, *tokens[start : start + 16]], len(lead) + 8)
    assert len(found) == count - (not lead)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_model_that_knows_nothing_has_its_vocabulary_as_perplexity(folder: Path) -> None:
    model = load_model(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = losses(model, Passage(tuple(prompt(300))))
    assert found.perplexity == pytest.approx(101, rel=1e-5)
    assert found.estimate.error == pytest.approx(0, abs=1e-6)


def test_estimates_are_means_with_standard_errors_and_differences_are_paired() -> None:
    assert Estimate.of([1.0, 2.0, 3.0, 6.0]) == Estimate(3.0, math.sqrt(14 / 3 / 4))
    hard = Losses((1.0, 9.0, 5.0, 2.0))
    assert Losses(tuple(value + 0.5 for value in hard.values)).above(hard) == Estimate(0.5, 0.0)
    assert Losses((800.0, 900.0)).perplexity == math.inf


@pytest.mark.parametrize(
    ("passage", "window", "says"),
    [
        (Passage((3, 4)), 16, "too short"),
        (Passage((3, 101, 4, 5)), 16, "ids beyond the model's 101 tokens"),
        (Passage(tuple(range(9)), lead=(1, 2)), 3, "has no room"),
    ],
)
def test_what_cannot_be_measured_says_why(model: Any, passage: Passage, window: int, says: str) -> None:
    with pytest.raises(PassageError, match=says):
        losses(model, passage, window=window)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = load_file(folder / "model.safetensors")
    del kept["model.layers.1.self_attn.k_proj.weight"]
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PassageError, match=r"layers\.1\.self_attn\.k_proj"):
        load_model(tmp_path)
    with pytest.raises(PassageError, match="cannot load"):
        load_model(tmp_path / "nowhere")


def test_a_passage_is_the_text_without_what_the_tokenizer_adds(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(["<s>", "</s>", *"abc"])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Passage.read(tmp_path, "abcabc") == Passage((2, 3, 4, 2, 3, 4))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Passage.read(tmp_path, "abcabc") == Passage((2, 3, 4, 2, 3, 4), lead=(0,))
    with pytest.raises(PassageError, match=r"tokenizer\.json cannot be read"):
        Passage.read(tmp_path / "nowhere", "a")
