"""ModelIdentity: what config.json says of any decoder, and what cannot be served as far as it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.models.identity import ModelIdentity
from workers.models.refusals import REASONS, refusal
from workers.models.spec import Unsupported

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "dtype": "bfloat16",
}


def read(folder: Path, config: dict[str, Any], **generation: object) -> ModelIdentity:
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelIdentity.read(folder)


def test_what_every_decoder_says(tmp_path: Path) -> None:
    found = read(tmp_path, GRANITE, eos_token_id=[2, 7])
    assert found == ModelIdentity("GraniteForCausalLM", False, 100, 4096, (2, 7), 1, "bfloat16")


def test_a_native_model_is_read_as_its_spec_reads_it(tmp_path: Path) -> None:
    llama = GRANITE | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    found = read(tmp_path, llama)
    assert found.native and found.context_length == 8192


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({"max_position_embeddings": None, "n_positions": 512}, 512),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1024}}, 1024),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 4.0}}}, 4096),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}, 4096),
    ],
)
def test_positions_reach_as_far_as_no_row_changes_anothers_angles(
    tmp_path: Path, fields: dict[str, Any], reach: int
) -> None:
    assert read(tmp_path, GRANITE | fields).context_length == reach


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "weight format 'awq'"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"alibi": True}, "ALiBi"),
        ({"model_type": "jamba"}, "recurrent state"),
        ({"model_type": None}, "no model_type"),
        ({"text_config": {"hidden_size": 3}}, r"wraps a decoder of text with other models \(config field text_config"),
        ({"vocab_size": "many"}, "lacks vocab_size"),
        ({"max_position_embeddings": None}, "lacks max_position_embeddings or n_positions"),
    ],
)
def test_what_config_json_rules_out_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=f"GraniteForCausalLM .*{said}"):
        read(tmp_path, GRANITE | fields)


def test_a_family_with_a_reason_is_refused_with_it() -> None:
    assert refusal(GRANITE) is None
    assert all(refusal({"model_type": family}) == why for family, why in REASONS.items())


def test_a_folder_without_a_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"has no config\.json"):
        ModelIdentity.read(tmp_path)
