"""Where weights come from: the default model, a local folder, a GGUF file, or a repository of the Hugging Face hub.

`resolve` gives a folder with config.json, safetensors and tokenizer.json, or says what is missing. Whether the model's
architecture is supported is not known here. As a program it prints the folder: `python -m deploy.catalog [MODEL]`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

from deploy.config import DEFAULT_MODEL, Environment
from deploy.ggufmodel import converted, find_gguf, provide_gguf
from deploy.staging import STAMP, ModelError, Progress
from deploy.wheelmodel import SMOLLM2, provide

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]
_NOT_NEEDED = ["*/*"]
_INDEX = "model.safetensors.index.json"


def resolve(model: str, revision: str | None, progress: Progress, environment: Environment | None = None) -> Path:
    """The folder of `model`: a name known here, a path to a folder or a GGUF file, or a hub id ("org/name", at
    `revision`). A GGUF file is converted once, into the cache.

    Raises ModelError with what is missing and what to do.
    """
    local = Path(model).expanduser()
    if model == SMOLLM2.name and not revision:
        return provide(SMOLLM2, (environment or Environment.read()).cache, progress)
    if local.exists() or not _HUB_ID.fullmatch(model):
        if revision:
            raise ModelError(
                f"revision {revision} is given, but {model} is no hub id; a revision goes with org/name only"
            )
        if source := find_gguf(local):
            return check_folder(provide_gguf(source, (environment or Environment.read()).cache, progress))
        if not local.is_dir():
            raise ModelError(
                f"{model} is neither {SMOLLM2.name}, nor an existing folder, nor a hub id like org/name, "
                "nor a .gguf file"
            )
        return check_folder(local.resolve())
    return check_folder(_from_hub(model, revision, progress))


def folder_here(model: str, environment: Environment) -> Path | None:
    """The folder of `model` as far as it is on this machine outside the hub's cache; nothing is fetched or converted.
    Raises ModelError for a path that cannot be meant."""
    local = Path(model).expanduser()
    if model == SMOLLM2.name:
        return environment.cache / "models" / SMOLLM2.name
    if source := find_gguf(local):
        return converted(source, environment.cache)
    return local if local.is_dir() else None


def local_config(model: str, revision: str | None = None) -> Path | None:
    """The config.json of a local folder, a config.json itself, or that of a hub id as far as the hub's own cache has
    it. Nothing is downloaded. None when `model` is neither a path nor a hub id; ModelError says what is missing."""
    local = Path(model).expanduser()
    if (local / "config.json").is_file():
        return local / "config.json"
    if source := find_gguf(local):
        folder = converted(source, Environment.read().cache)
        if folder is None:
            raise ModelError(f"{source} is not converted yet: `python -m deploy.catalog {source}` does it")
        return folder / "config.json"
    if local.is_file():
        return local
    if local.is_dir():
        raise ModelError(f"{local} has no config.json: not a model folder")
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ModelError(
            f"config.json of {model} is not in the hub's cache on this machine, and it is all that is needed: "
            f"`hf download {model} config.json` gets it, without weights; or pass a folder"
        )
    return Path(found)


def check_folder(folder: Path) -> Path:
    """`folder` itself, if it has all that a model needs; else ModelError lists what is missing or cut short."""
    faults = [*_config_faults(folder), *_weight_faults(folder)]
    if not (folder / "tokenizer.json").is_file():
        faults.append(
            "tokenizer.json is missing (transformers writes one: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    if faults:
        raise ModelError(f"{folder} cannot be served:\n" + "\n".join(f"  {fault}" for fault in faults))
    return folder


def fingerprint(folder: Path) -> str:
    """What identifies the weights in `folder`, 16 hex digits: the stamp of a converted model, else config.json and each
    weight file's size and header. The same on every node that has the same files."""
    digest = hashlib.sha256()
    stamped = folder / STAMP
    for path in [stamped] if stamped.is_file() else [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as handle:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            digest.update(handle.read(2**16))
    return digest.hexdigest()[:16]


def _config_faults(folder: Path) -> list[str]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return ["config.json is missing"]
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read: {error}"]
    if not isinstance(config, dict) or not config.get("architectures"):
        return ["config.json names no architecture"]
    return []


def _weight_faults(folder: Path) -> list[str]:
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            return [f"{_INDEX} cannot be read: {error!r}"]
        return [f"{shard} is missing ({_INDEX} names it)" for shard in shards if not (folder / shard).is_file()]
    if (folder / "model.safetensors").is_file():
        return []
    others = sorted({path.suffix for path in folder.glob("*") if path.suffix in (".bin", ".pth", ".pt", ".gguf")})
    hint = f"; {', '.join(others)} files are not read: save the model as safetensors" if others else ""
    return [f"model.safetensors is missing (or {_INDEX} and its shards){hint}"]


def _from_hub(model: str, revision: str | None, progress: Progress) -> Path:
    """Download what is needed of a hub repository into the hub's own cache, or find it there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"{model} at {revision}" if revision else model
    progress(f"getting {name} from the hub, or its local cache")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_NOT_NEEDED))
    except GatedRepoError as error:
        raise ModelError(f"{model} asks for permission: accept its terms on the hub and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no repository {model}, or it is private: run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} is not in the local cache and the hub cannot be reached; "
            "check the network, or copy the model's folder here and pass its path"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{name} could not be downloaded: {error}") from error


def main() -> None:
    """Print the folder of the model named on the command line (default: the default model); progress on stderr."""
    try:
        folder = resolve(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL, None, _Stages())
    except ModelError as error:
        sys.exit(f"tidegate: {error}")
    print(folder)


class _Stages:
    """Prints a stage once, however often its figures change."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        stage = text.partition(":")[0] if text.startswith("downloading") else text
        if stage != self._last:
            print(stage, file=sys.stderr, flush=True)
        self._last = stage


if __name__ == "__main__":
    main()
