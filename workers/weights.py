"""Checkpoint: slices of tensors out of a folder of safetensors files, mapped into memory: nothing is read before it is
used, and nothing twice.

It checks that every tensor is there, whole and of the expected shape, and that nothing was left unread; it knows no
model. The format is safetensors: 8 bytes of header length, a JSON header, raw values. FP8 weights with a scale per
block (DeepSeek-V3's, arXiv 2412.19437 section 3.3) are multiplied out as they are read.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
"""What the name of an FP8 tensor's scales ends with. In spite of it they are multiplied with."""


class WeightError(ValueError):
    """A tensor or file that is missing, left over, misshapen, truncated or of an unknown format; the text names it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors of `folder` by name. A context manager: closing it lets go of the mapped files, once no tensor that
    it gave is left. `fp8_block`: rows and columns of FP8 weights that share a scale; None: FP8 is not expected."""

    def __init__(self, folder: Path, fp8_block: tuple[int, int] | None = None) -> None:
        self._fp8_block = fp8_block
        self._entries: dict[str, _Entry] = {}
        for file in _files(folder):
            for name, entry in _header(file).items():
                if name in self._entries:
                    raise WeightError(f"tensor {name} is in both {self._entries[name].file.name} and {file.name}")
                self._entries[name] = entry
        self._unread = set(self._entries)
        self._mapped: dict[Path, Tensor] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mapped.clear()

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        return name in self._entries

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tensor `name`, whose whole shape must be `shape`: its [start, stop) rows or columns, in the file's dtype; FP8
        with its scales multiplied out, in fp32. It is a view of the mapped file, which should not be kept: `to_dtype`
        gives memory of its own."""
        entry = self._entry(name, shape)
        if entry.dtype == _FP8 and name + _SCALE in self._entries:
            return self._scaled(name, entry, rows, columns)
        if entry.dtype not in _FORMATS:
            raise WeightError(f"tensor {name} has weight format {entry.dtype}; supported: {', '.join(_FORMATS)}")
        return _cut(self._values(name, entry, _FORMATS[entry.dtype]), rows, columns)

    def skip(self, name: str) -> None:
        """Leave `name` unread on purpose, whether it is there or not."""
        self._unread.discard(name)

    def skip_under(self, prefix: str) -> None:
        """Leave all tensors whose names begin with `prefix` unread on purpose."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def finish(self) -> None:
        """Raise WeightError if a tensor was neither taken nor skipped: the model has parts that nothing computes."""
        # Some checkpoints carry rotary frequencies, which follow from config.json.
        extra = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise WeightError(f"the checkpoint has tensors that this model does not use: {', '.join(extra[:3])}{more}")

    def _entry(self, name: str, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise WeightError(f"tensor {name} is missing from the checkpoint")
        if entry.shape != shape:
            raise WeightError(f"tensor {name} has shape {list(entry.shape)}, config.json implies {list(shape)}")
        return entry

    def _values(self, name: str, entry: _Entry, dtype: torch.dtype) -> Tensor:
        """All of a tensor, a view of the mapped file."""
        if entry.end - entry.begin != math.prod(entry.shape) * dtype.itemsize:
            raise WeightError(f"tensor {name} of {list(entry.shape)} {entry.dtype} has {entry.end - entry.begin} bytes")
        self._unread.discard(name)
        values = self._map(entry.file)[entry.begin : entry.end]
        # A file whose header has an odd length holds tensors that no CPU likes to read in place.
        return (values if entry.begin % dtype.itemsize == 0 else values.clone()).view(dtype).view(entry.shape)

    def _scaled(
        self, name: str, entry: _Entry, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> Tensor:
        """FP8 values times the scales of their blocks, fp32; only what is asked for is read."""
        if self._fp8_block is None or len(entry.shape) != 2:
            raise WeightError(
                f"tensor {name} of {list(entry.shape)} is FP8 with scales; that is read of matrices, where config.json "
                "has a quantization_config with quant_method fp8 and weight_block_size"
            )
        height, width = self._fp8_block
        counts = tuple(-(-size // block) for size, block in zip(entry.shape, self._fp8_block, strict=True))
        start, stop = rows or (0, entry.shape[0])
        values = _cut(self._values(name, entry, torch.float8_e4m3fn), rows, columns).float()
        across = torch.arange(*(columns or (0, entry.shape[1]))) // width
        scales = self.take(name + _SCALE, counts).float()
        for block in range(start // height, -(-stop // height)):
            first, last = max(start, block * height), min(stop, (block + 1) * height)
            values[first - start : last - start].mul_(scales[block, across])
        return values

    def _map(self, path: Path) -> Tensor:
        """The bytes of `path`. Writing to them would change this process's copy, not the file."""
        if path not in self._mapped:
            try:
                with path.open("rb") as stream:
                    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                    content = mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                raise WeightError(f"{path.name} cannot be read: {error}") from error
            self._mapped[path] = torch.frombuffer(content, dtype=torch.uint8)
        return self._mapped[path]


def _cut(whole: Tensor, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Tensor:
    if columns is not None:
        return whole[:, columns[0] : columns[1]]
    return whole[slice(*rows)] if rows else whole


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_index(index).values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; found {', '.join(others[:3])}" if others else ""
        raise WeightError(f"{folder} has no model.safetensors and no model.safetensors.index.json{found}")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightError(f"weight file {name} named by {index.name} is missing from {folder}")
    return [folder / name for name in names]


def _index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{path.name} is not a safetensors index: {error!r}") from error
    return {str(key): str(value) for key, value in content.items()}


def _header(file: Path) -> dict[str, _Entry]:
    """Name → entry of every tensor in `file`; raises WeightError naming the first tensor that the file cuts off."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightError(f"{file.name} is truncated: its header is cut off")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise WeightError(f"{file.name} has no safetensors header: {error}") from error
    entries = {}
    for name, fields in sorted(header.items()):
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in fields["data_offsets"])
        if end > size:
            raise WeightError(f"tensor {name} is truncated: {file.name} ends after {size} bytes")
        if not 8 + length <= begin <= end:
            raise WeightError(f"tensor {name} has impossible offsets: {fields['data_offsets']}")
        entries[name] = _Entry(file, fields["dtype"], tuple(fields["shape"]), begin, end)
    return entries


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` as `dtype`, contiguous, its memory its own: never a view of a mapped file."""
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
