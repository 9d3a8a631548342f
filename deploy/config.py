"""ClusterConfig: everything an operator sets, checked at start. The only reader of environment variables.

Knows neither Ray nor torch nor where weights come from. What goes down to a group, an ingress or the coordinator is a
frozen settings value that `deploy.settings` makes of it; the config itself stays in `deploy`.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StrictInt, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from deploy.document import Document, DocumentError
from deploy.sections import (
    DEFAULT_MODEL,
    Count,
    Fraction,
    Ladder,
    LadderSection,
    LineSection,
    ModelSection,
    Names,
    QualitySection,
    Seconds,
    Size,
    Switch,
    Text,
)

__all__ = ["DEFAULT_MODEL", "ClusterConfig", "ConfigError", "Environment", "child_environment", "is_loopback", "load"]

_SECTIONS: dict[str, type[BaseModel]] = {
    "models": ModelSection,
    "quality": QualitySection,
    "line": LineSection,
    "ladder": LadderSection,
}

_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray tells a job's program about the job by this variable, whose name is what it says."""


class ConfigError(ValueError):
    """The config is refused; one line per fault: where, which key, what is wrong, what to write instead."""


class _MisplacedKey(PydanticCustomError):
    """A fault of the whole that one key is to blame for."""

    def __new__(cls, key: str, said: str) -> Self:
        return super().__new__(cls, "misplaced", "{said}", {"said": said, "key": key})


class ClusterConfig(ModelSection):
    """One service: its models, the groups that run them, the ingress before them. Sizes are bytes after parsing.

    One model stands in the keys of ModelSection at the top; several stand in `models`, and then none at the top.
    `gpu_memory_utilization` is a share of each GPU, `cpu_memory_utilization` one of the machine's memory over all
    groups; both hold weights, buffers and KV pool; `kv_memory` goes before them. Files are named, never their contents:
    Serve shows an application's arguments to whoever asks it. `update`: whether a group is replaced by ending it first,
    or by starting its successor beside it, which takes room for one more group.
    """

    models: tuple[ModelSection, ...] = ()
    service_name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "tidegate"
    ingress_replicas: Count = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_memory_utilization: Fraction = 0.9
    cpu_memory_utilization: Fraction = 0.25

    api_keys_file: Text | None = None
    allow_remote: Switch = False
    host: Text = "127.0.0.1"
    port: Annotated[StrictInt, Field(ge=1, le=65_535)] = 8000
    proxy: Literal["auto", "serve"] = "auto"
    body_limit: Size = 8 * 2**20
    request_timeout_s: Seconds = 600.0
    stream_comment_s: Seconds = 10.0
    max_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 5
    streams: Literal["auto", "socket", "ray"] = "auto"
    stream_pace_s: Annotated[float, Field(ge=0, le=1)] = 0.02
    drain_s: Seconds = 30.0
    step_timeout_s: Seconds = 60.0
    flight_dir: Text | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    update: Literal["stop-first", "surge"] = "stop-first"

    cache_scope: Literal["auto", "tenant", "session"] = "auto"
    namespace_secret_file: Names = ()
    public_prompts_file: Text | None = None
    session_ttl_s: Seconds = 300.0
    max_keep_alive_s: Annotated[float, Field(ge=0, le=86_400)] = 3600.0
    session_blocks: Count | None = None
    tenant_blocks: Count | None = None

    line: LineSection = LineSection()
    ladder: Ladder = LadderSection()

    @field_validator("models")
    @classmethod
    def _one_name_one_model(cls, models: tuple[ModelSection, ...]) -> tuple[ModelSection, ...]:
        owners: dict[str, int] = {}
        for index, section in enumerate(models):
            for name in section.names:
                if name in owners:
                    raise ValueError(
                        f"models.{index} answers to {name}, as models.{owners[name]} does; "
                        "give them different served_model_names"
                    )
                owners[name] = index
        return models

    @field_validator("namespace_secret_file")
    @classmethod
    def _secrets_differ(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(files)) != len(files):
            raise ValueError(f"names a file twice: {', '.join(files)}")
        return files

    @field_validator("host")
    @classmethod
    def _host(cls, host: str, info: ValidationInfo) -> str:
        if is_loopback(host):
            return host
        if info.data.get("allow_remote") is False:
            raise ValueError(
                f"{host} can be reached from other machines; set allow_remote: true if that is meant, or use 127.0.0.1"
            )
        if "api_keys_file" in info.data and info.data["api_keys_file"] is None:
            raise ValueError(
                f"{host} can be reached from other machines, and without keys everybody there could use the service: "
                "set api_keys_file (`tidegate keys new` makes a key), or use 127.0.0.1"
            )
        return host

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """`models` and the keys of a single model exclude each other."""
        if not self.models and "models" in self.model_fields_set:
            raise _MisplacedKey("models", "lists no model; leave the key out for a single one")
        both = sorted(self.model_fields_set & set(ModelSection.model_fields)) if self.models else ()
        if both:
            others = f" ({', '.join(both[1:])} too)" if len(both) > 1 else ""
            said = f"stands beside models; move it into those entries of models that it is meant for{others}"
            raise _MisplacedKey(both[0], said)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names clients may use, of all models."""
        return tuple(name for section in self.models for name in section.names) or super().names

    @property
    def sections(self) -> tuple[ModelSection, ...]:
        """One section per model, in whichever form they were given."""
        return self.models or (self,)

    @property
    def ranks(self) -> int:
        """Ranks of all groups of all models together."""
        return sum(section.model_ranks for section in self.sections)

    @property
    def most_ranks(self) -> int:
        """Ranks that may stand at one time: where a successor comes first, one group of each model more."""
        beside = sum(section.tensor_parallel_size for section in self.sections) if self.update == "surge" else 0
        return self.ranks + beside


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that Tidegate reads: TIDEGATE_CACHE (folder for models, default ~/.cache/tidegate) and
    TIDEGATE_NAMESPACE_SECRET_FILE (file that keys the prefix cache's namespaces); and of Ray: RAY_USE_TLS, whether what
    its processes say to each other is encrypted, and whether this process is a Ray job's."""

    cache: Path
    namespace_secret_file: str | None = None
    encrypted: bool = False
    in_ray_job: bool = False

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Read `variables` (the process's own by default)."""
        cache = variables.get("TIDEGATE_CACHE") or "~/.cache/tidegate"
        encrypted = variables.get("RAY_USE_TLS", "0").lower() in ("1", "true")
        secret = variables.get("TIDEGATE_NAMESPACE_SECRET_FILE") or None
        return cls(Path(cache).expanduser(), secret, encrypted, _RAY_JOB in variables)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a subprocess."""
    return {**os.environ, **changes}


def is_loopback(host: str) -> bool:
    """Whether `host` is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """The config of the YAML file `path` (None: defaults), with `overrides` (None values are left out) before it.

    Raises ConfigError; a fault in the file is named by file and line.
    """
    try:
        document = Document.read(path) if path else Document("config", {}, {})
    except DocumentError as error:
        raise ConfigError(str(error)) from error
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    try:
        return ClusterConfig.model_validate({**document.values, **given})
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise ConfigError("\n".join(_fault(document, given, fault) for fault in faults)) from error


def _fault(document: Document, given: Iterable[str], fault: ErrorDetails) -> str:
    place = tuple(str(part) for part in fault["loc"])
    if fault["type"] == "misplaced":
        place = (fault["ctx"]["key"],)
    key = place[0] if place else ""
    where = f"--{key.replace('_', '-')}" if key in given else document.where(*place)
    path = ".".join(place)
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(place[-1], _known_keys(place), n=1, cutoff=0.5)
        return f"{where}: {path}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if fault["type"] == "misplaced":
        return f"{where}: {path}: {fault['msg']}"
    if fault["type"] == "value_error":
        return f"{where}: {path}: {fault['ctx']['error']}"
    return f"{where}: {path}: {fault['msg'][:1].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _known_keys(place: tuple[str, ...]) -> Iterable[str]:
    """The keys that may stand where the one at `place` stands."""
    above = next((key for key in reversed(place[:-1]) if key in _SECTIONS), "")
    return _SECTIONS.get(above, ClusterConfig).model_fields
