"""GGUF -> safetensors, config.json and tokenizer.json, as a program: `python -m deploy.conversion GGUF FOLDER`.

A subprocess, so that whoever starts a service does not keep torch and a whole model in memory. transformers unpacks and
un-permutes the weights. A tokenizer.json that lies beside the file is taken as it is; else transformers builds one from
the file's own tables, where it knows how text is split; SmolLM's is built here, since transformers would drop the
splitting of digits ("a  12" would get other ids than the model was trained on). Prints one line per stage.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from workers.models.refusals import refusal

VERSION = 1
"""Goes into the stamp of a converted model: raise it when the output of this file changes."""

_CONTROL = 3
_SMOLLM = ("gpt2", "smollm")
_PROBES = {
    "a  12": ["a", "ĠĠ", "1", "2"],
    "naïve café": ["na", "Ã¯ve", "ĠcafÃ©"],
    "😀 of 7": ["ðŁ", "ĺ", "Ģ", "Ġof", "Ġ", "7"],
    "<|im_start|>user\n": ["<|im_start|>", "user", "Ċ"],
}


_FLOATS = {frozenset({"F32"}): "float32", frozenset({"F32", "F16"}): "float16", frozenset({"F16"}): "float16"}
"""Formats of a file's tensors → the weights' dtype, where unpacking loses nothing; any other file gives bfloat16."""
_OWN_KINDS = ("gpt-2", "gpt2")
"""Ways of splitting text that transformers takes for granted."""


def main() -> None:
    """Convert argv[1] into the existing folder argv[2]."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert(source, folder)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        sys.exit(f"{error.args[0] if isinstance(error, KeyError) else error}")


def convert(source: Path, folder: Path) -> None:
    """Fill `folder` with the model in `source`. Raises ValueError for what cannot be converted, with the reason."""
    _say("reading the vocabulary")
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if "general.architecture" not in fields:
        raise ValueError("the file does not say its architecture (general.architecture)")
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    beside = source.parent / "tokenizer.json"
    if not beside.is_file() and kind == _SMOLLM:
        _write_tokenizer(fields, folder)
    _say("loading torch and transformers")
    _check(source, fields)
    if beside.is_file():
        _copy_tokenizer(source.parent, folder)
    elif kind != _SMOLLM:
        _have_tokenizer_built(source, folder, kind)
    formats = frozenset(tensor.tensor_type.name for tensor in reader.tensors)
    _write_weights(source, folder, _FLOATS.get(formats, "bfloat16"))
    _tidy_config(folder)


def _say(stage: str) -> None:
    print(stage, flush=True)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF's metadata describes. ValueError names a kind that is not known here."""
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != _SMOLLM:
        raise ValueError(f"GGUF tokenizer of kind {kind} is not built here, only {_SMOLLM}")
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
        known = all(tokenizer.token_to_id(piece) is not None for piece in pieces)
        if known and tokenizer.encode(text).tokens != pieces:
            raise ValueError(f"the tokenizer splits {text!r} into {tokenizer.encode(text).tokens}, not {pieces}")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{role}_token": tokenizer.id_to_token(fields[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    settings = {
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "tokenizer_class": "TokenizersBackend",
    }
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """That of the folder of the GGUF file."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _have_tokenizer_built(source: Path, folder: Path, kind: tuple[Any, Any]) -> None:
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model, split = kind
    known = (*_OWN_KINDS, *GGUF_PRE_TOKENIZER_SPLITS)
    if model not in ("gpt2", "llama", "gemma4") or (model == "gpt2" and split not in known):
        raise ValueError(
            f"its tokenizer ({model}, {split}) is of a kind that nobody here can build from the file alone: put the "
            "model's own tokenizer.json and tokenizer_config.json beside it"
        )
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _check(source: Path, fields: dict[str, Any]) -> None:
    """Raise ValueError for an architecture that transformers cannot unpack, or that is not served."""
    from transformers import AutoConfig
    from transformers.integrations.gguf import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    name = str(fields["general.architecture"])
    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS} - {"general", "tokenizer"})
    if _plain(name) not in map(_plain, known):
        raise ValueError(
            f"transformers cannot unpack GGUF files of architecture {name!r}, only of {', '.join(known)}; take the "
            "model's safetensors"
        )
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    if why := refusal(config.to_dict()):
        raise ValueError(f"a model of architecture {name!r} cannot be served: {why}")


def _plain(name: str) -> str:
    """As llama.cpp and transformers spell it alike."""
    return re.sub("[-_]", "", name)


def _write_weights(source: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    _say(f"unpacking the weights to {dtype}")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    _say("writing safetensors")
    model.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _tidy_config(folder: Path) -> None:
    """GGUF keeps a norm's epsilon as a float32 and the training run's name: write what the model's card says."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("_model_name_or_path", None)
    config |= {key: float(f"{value:.6g}") for key, value in config.items() if key.endswith(("_eps", "_epsilon"))}
    _write_json(path, config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
