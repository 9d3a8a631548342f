"""GGUF -> safetensors, config.json and tokenizer.json, as a program: `python -m deploy.conversion GGUF FOLDER`.

A subprocess, so that whoever starts a service does not keep torch and a whole model in memory. transformers unpacks and
un-permutes the weights; the tokenizer is built here from the GGUF's own tables, since transformers' reading of them
drops the splitting of digits ("a  12" would get other ids than the model was trained on). Prints one line per stage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VERSION = 1
"""Goes into the stamp of a converted model: raise it when the output of this file changes."""

_CONTROL = 3
_PROBES = {
    "a  12": ["a", "ĠĠ", "1", "2"],
    "naïve café": ["na", "Ã¯ve", "ĠcafÃ©"],
    "😀 of 7": ["ðŁ", "ĺ", "Ģ", "Ġof", "Ġ", "7"],
    "<|im_start|>user\n": ["<|im_start|>", "user", "Ċ"],
}


def main() -> None:
    """Convert argv[1] into the existing folder argv[2]."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    _say("reading the vocabulary")
    fields = _read_fields(source)
    _write_tokenizer(fields, folder)
    _write_weights(source, folder)
    _tidy_config(folder)


def _say(stage: str) -> None:
    print(stage, flush=True)


def _read_fields(source: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by name."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(source).fields.items()}


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF's metadata describes. ValueError names a kind that is not known here."""
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"GGUF tokenizer of kind {kind} is not supported; supported: ('gpt2', 'smollm')")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokenizer = build_tokenizer(fields)
    for text, pieces in _PROBES.items():
        if tokenizer.encode(text).tokens != pieces:
            raise ValueError(f"the tokenizer splits {text!r} into {tokenizer.encode(text).tokens}, not {pieces}")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{role}_token": tokenizer.id_to_token(fields[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings = {
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "TokenizersBackend",
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(source: Path, folder: Path) -> None:
    _say("loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    _say("unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    _say("writing safetensors")
    model.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _tidy_config(folder: Path) -> None:
    """GGUF keeps the norm's epsilon as a float32 and the training run's name: write what the model's card says."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("_model_name_or_path", None)
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    _write_json(path, config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
