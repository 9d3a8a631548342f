"""A model in one GGUF file: converted once into a folder of safetensors under the cache, which is found again by the
file's content. Knows files and their hashes; what the conversion makes of them is `deploy.conversion`'s affair.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from deploy import conversion
from deploy.sizes import format_size
from deploy.staging import ModelError, Progress, check_room, convert, has_stamp, make_once

_SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_ROOM = 4
"""Times the file's own size that a conversion takes: 4-bit weights become 16-bit ones."""
_MOST = 64
"""Characters of a folder's name that come from the file's."""


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` names, or that is the only one in the folder `path`, where no safetensors lie beside
    it. None for another path. Raises ModelError for several, and for one part of several."""
    if path.is_file():
        found = [path] if path.suffix == _SUFFIX else []
    elif path.is_dir() and not any(path.glob("*.safetensors")):
        found = sorted(path.glob(f"*{_SUFFIX}"))
    else:
        return None
    if parts := [file.name for file in found if _PART.search(file.name)]:
        raise ModelError(
            f"{parts[0]} is one part of a GGUF file in several; join them first "
            "(llama.cpp: llama-gguf-split --merge FIRST-PART WHOLE.gguf)"
        )
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4]) + (", …" if len(found) > 4 else "")
        raise ModelError(f"{path} has several GGUF files ({names}); name one of them instead of the folder")
    return found[0].resolve() if found else None


def provide_gguf(source: Path, cache: Path, progress: Progress) -> Path:
    """The folder of the model in the GGUF file `source` under `cache`, made if need be. Raises ModelError."""

    def make(built: Path, staging: Path) -> None:
        check_room(staging, _ROOM * source.stat().st_size, source.name)
        convert(source, built, progress)

    digest = _digest(source, cache, progress)
    return make_once(_folder(source, digest, cache), _stamp(source, digest), make, progress)


def converted(source: Path, cache: Path) -> Path | None:
    """What `provide_gguf` gave for the file as it is, if that is still there. Reads none of the weights."""
    digest = _remembered(_memo(source, cache), _seen(source))
    if digest is None:
        return None
    folder = _folder(source, digest, cache)
    return folder if has_stamp(folder, _stamp(source, digest)) else None


def _stamp(source: Path, digest: str) -> dict[str, object]:
    return {"sha256": digest, "tokenizer": _beside(source), "converter": conversion.VERSION}


def _beside(source: Path) -> str | None:
    """SHA-256 of the tokenizer.json beside `source`, which goes before what the file itself says."""
    path = source.parent / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _folder(source: Path, digest: str, cache: Path) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip(".-")[:_MOST]
    return cache / "models" / f"{name}-{digest[:12]}"


def _digest(source: Path, cache: Path, progress: Progress) -> str:
    """SHA-256 of `source`; remembered under `cache` for as long as its size and time of change stay the same."""
    try:
        seen, memo = _seen(source), _memo(source, cache)
        if known := _remembered(memo, seen):
            return known
        progress(f"reading {source.name}, {format_size(source.stat().st_size)}, to know its content")
        with source.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        memo.parent.mkdir(parents=True, exist_ok=True)
        fresh = memo.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"seen": seen, "sha256": digest}), encoding="utf-8")
        fresh.rename(memo)
    except OSError as error:
        raise ModelError(f"{source} cannot be read: {error}") from error
    return digest


def _seen(source: Path) -> list[object]:
    """By what a file that has not changed is known."""
    facts = source.stat()
    return [str(source), facts.st_size, facts.st_mtime_ns]


def _memo(source: Path, cache: Path) -> Path:
    return cache / "models" / f".{hashlib.sha256(str(source).encode()).hexdigest()[:16]}.gguf.json"


def _remembered(memo: Path, seen: list[object]) -> str | None:
    """The hash in `memo`, if it is that of the file as it was `seen`."""
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        return str(known["sha256"]) if known["seen"] == seen else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing that could be used: the file is read again
