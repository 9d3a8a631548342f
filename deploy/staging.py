"""Folders of models that are made once and kept under the cache: by one process at a time, whole or not at all.

Knows how a folder comes into its place and how the conversion runs; not where a model comes from.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from deploy.config import child_environment
from deploy.house import ROOT
from deploy.sizes import format_size

Progress = Callable[[str], None]
STAMP = "tidegate.json"


class ModelError(ValueError):
    """A model cannot be had or used; the message says why and what to do."""


def has_stamp(folder: Path, stamp: Mapping[str, object]) -> bool:
    """Whether `folder` was made of what `stamp` says, by the converter that it says."""
    try:
        found = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return all(found.get(key) == value for key, value in stamp.items())


def make_once(final: Path, stamp: Mapping[str, object], make: Callable[[Path, Path], None], progress: Progress) -> Path:
    """`final`, if it has `stamp`; else what `make` puts into the empty folder that it gets, beside another one for what
    it needs meanwhile. Raises ModelError; then nothing is left of it, and what was there before stays."""
    if has_stamp(final, stamp):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.parent / f".{final.name}.lock", progress):
            if not has_stamp(final, stamp):
                _make(final, stamp, make)
    except OSError as error:
        raise ModelError(f"cannot keep {final.name} under {final.parent}: {error}; TIDEGATE_CACHE moves it") from error
    return final


def check_room(folder: Path, needed: int, name: str) -> None:
    """Raise ModelError unless `needed` bytes are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder} has {format_size(free)} free, {format_size(needed)} are needed while {name} is "
            "converted; make room, or set TIDEGATE_CACHE to a folder elsewhere"
        )


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Convert the GGUF file `source` into `folder`, in a process of its own, whose stages are passed on."""
    command = [sys.executable, "-m", "deploy.conversion", str(source), str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        environment = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT)
        assert process.stdout is not None
        for stage in process.stdout:
            progress(f"converting: {stage.strip()}")
        if process.wait():
            errors.seek(0)
            raise ModelError(f"the conversion of {source.name} failed:\n{errors.read().strip()[-1500:]}")


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold `path` against other processes; the kernel lets go when a holder dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(final: Path, stamp: Mapping[str, object], make: Callable[[Path, Path], None]) -> None:
    """Build the folder beside `final` and rename it into place; the caller holds the lock."""
    for left in final.parent.glob(f".{final.name}.*.partial"):
        shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        built = staging / "model"
        built.mkdir()
        make(built, staging)
        facts = {**stamp, "transformers": version("transformers")}
        (built / STAMP).write_text(json.dumps(facts, indent=2) + "\n")
        if final.exists():
            final.rename(staging / "replaced")
        built.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
