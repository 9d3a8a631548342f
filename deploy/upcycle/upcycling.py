"""Upcycling: a checkpoint with fewer KV heads, each the mean of a group of those before. Written as a folder, or put
into a loaded model to see what it costs.

The conversion is the first half of "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints" (Ainslie et al., arXiv 2305.13245, section 2.1). The second half, training on, is not done here. Which
checkpoints can be pooled is `deploy.upcycle.kvheads`' to say; what a text thinks of the result,
`deploy.quality.perplexity`'s.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deploy.sizes import format_size
from deploy.upcycle.kvheads import INDEX, KVHeads, UpcyclingError, read_json

Progress = Callable[[str], None]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_NOT_COPIED = ("config.json", INDEX, "tidegate.json")
"""The first two are written anew; the last says which model this folder holds, which is no longer so."""


def pool(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """`tensor` [heads · head_dim, …] with each group of neighbouring heads replaced by their mean:
    [groups · head_dim, …], in its own dtype. `groups` must divide `heads`.

    The mean is taken in fp64, so that equal heads give exactly themselves, whatever their number and dtype.
    """
    dim = tensor.shape[0] // heads
    grouped = tensor.to(torch.float64).reshape(groups, heads // groups, dim, *tensor.shape[1:])
    return grouped.mean(1).reshape(groups * dim, *tensor.shape[1:]).to(tensor.dtype)


def spread(tensor: Tensor, groups: int, heads: int) -> Tensor:
    """`tensor` [groups · head_dim, …] with each head as often as it has to serve: [heads · head_dim, …]."""
    dim = tensor.shape[0] // groups
    each = tensor.reshape(groups, dim, *tensor.shape[1:]).repeat_interleave(heads // groups, 0)
    return each.reshape(heads * dim, *tensor.shape[1:])


def upcycle(folder: Path, target: int, output: Path, progress: Progress = lambda _: None) -> KVHeads:
    """Write the model of `folder` with `target` KV heads per layer as the new folder `output`; the heads it then has.

    Dtypes, tensor names and the division into shards stay; one shard at a time is in memory. `output` appears whole or
    not at all. Raises UpcyclingError for a model or number that cannot be, an `output` that is in use, no room.
    """
    heads = KVHeads.read(folder)
    heads.check(target)
    _check_output(folder, output)
    try:
        with _staging(output) as built:
            sizes: dict[str, int] = {}
            for number, shard in enumerate(heads.shards, 1):
                progress(f"pooling heads: file {number} of {len(heads.shards)}")
                sizes |= _write_shard(folder / shard, built / shard, heads, target)
            _write_index(folder, built, sizes)
            _write_json(built / "config.json", read_json(folder / "config.json") | {"num_key_value_heads": target})
            _copy_rest(folder, built)
            built.rename(output)
    except OSError as error:
        raise UpcyclingError(f"{output} cannot be written: {error}") from error
    return KVHeads.read(output)


@contextmanager
def pooled(model: Any, heads: KVHeads, target: int) -> Iterator[None]:
    """While it lasts, `model`, loaded by transformers from the checkpoint of `heads`, computes what the checkpoint
    upcycled to `target` KV heads would: its shapes stay, heads of one group are equal.

    Raises UpcyclingError for a number that cannot be, and for a model that names its projections in another way.
    """
    heads.check(target)
    own = {name: parameter for name, parameter in model.named_parameters() if name in heads.projections}
    if missing := sorted(heads.projections - set(own)):
        raise UpcyclingError(f"{type(model).__name__} has no {missing[0]}: transformers names the weights otherwise")
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            # As the written file would have it: the mean is rounded to the checkpoint's dtype.
            mean = pool(before[name].to(_DTYPES[heads.precision.label]), heads.kv_heads, target)
            _assign(parameter, spread(mean, target, heads.kv_heads))
        yield
    finally:
        for name, parameter in own.items():
            _assign(parameter, before[name])


def _assign(parameter: Any, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _check_output(folder: Path, output: Path) -> None:
    if output.is_dir():
        if any(output.iterdir()):
            raise UpcyclingError(f"{output} is not empty; name a folder that is not there yet")
    elif output.exists() or output.is_symlink():
        raise UpcyclingError(f"{output} is not a folder; name one that is not there yet")
    if not output.absolute().parent.is_dir():
        raise UpcyclingError(f"{output.absolute().parent} is not there; make it first")
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = shutil.disk_usage(output.absolute().parent).free
    if free < needed:
        raise UpcyclingError(
            f"{output.absolute().parent} has {format_size(free)} free, up to {format_size(needed)} are needed; "
            "make room, or name a folder elsewhere"
        )


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A new folder beside `output`; what is still there at the end is removed."""
    outer = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.absolute().parent))
    try:
        # tempfile's own folder is closed to others; the one that stays has the usual mode.
        (outer / "model").mkdir()
        yield outer / "model"
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _write_shard(source: Path, target: Path, heads: KVHeads, count: int) -> dict[str, int]:
    """Write `source` with its projections pooled to `count` heads; bytes of each tensor by name."""
    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no dict)
            tensor = file.get_tensor(name)
            tensors[name] = pool(tensor, heads.kv_heads, count) if name in heads.projections else tensor
        save_file(tensors, target, file.metadata() or {"format": "pt"})
    target.chmod(0o644)
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _write_index(folder: Path, built: Path, sizes: Mapping[str, int]) -> None:
    """The index of a sharded checkpoint: the same files, their new size."""
    if not (folder / INDEX).is_file():
        return
    index = read_json(folder / INDEX)
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": sum(sizes.values())}
    index["metadata"].pop("total_parameters", None)
    _write_json(built / INDEX, index)


def _copy_rest(folder: Path, built: Path) -> None:
    """Tokenizer, generation settings, chat template, licence."""
    for path in sorted(folder.iterdir()):
        known = path.suffix in _COPIED or path.name.startswith(_LICENCES)
        if path.is_file() and known and path.name not in _NOT_COPIED and not path.name.startswith("."):
            shutil.copyfile(path, built / path.name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
