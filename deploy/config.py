"""ClusterConfig: everything an operator sets, checked at start. The only reader of environment variables.

Knows neither Ray nor torch nor where weights come from. What goes down to a group or an ingress is a frozen settings
value made here; the config itself stays in `deploy`.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ValidationInfo

from cluster.settings import IngressSettings
from deploy.document import Document, DocumentError
from deploy.sizes import parse_size
from workers.settings import GroupSettings

DEFAULT_MODEL = "smollm2-135m"
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
_LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_BLOCK_SIZES = (16, 32, 64, 128)


class ConfigError(ValueError):
    """The config is refused; one line per fault: where, which key, what is wrong, what to write instead."""


def _on_off(value: object) -> object:
    """YAML reads a bare on/off as a boolean; quoted it stays text. Both are fine."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _precision(value: object, supported: tuple[str, ...] = PRECISIONS) -> object:
    name = _LONG_NAMES.get(value, value) if isinstance(value, str) else value
    if name not in supported:
        raise ValueError(f"{value!r} is not supported; supported: {', '.join(supported)}")
    return name


def _one_or_more(value: object) -> object:
    """One name may stand without a list around it."""
    return (value,) if isinstance(value, str) else value


Count = Annotated[StrictInt, Field(ge=1)]
Size = Annotated[int, BeforeValidator(parse_size)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Annotated[str, BeforeValidator(_precision)]
Switch = Annotated[bool, Field(strict=True), BeforeValidator(_on_off)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_one_or_more)]


class ClusterConfig(BaseModel):
    """One service: a model, the groups that run it, the ingress before them. Sizes are bytes after parsing.

    `kv_memory` is per rank. `gpu_memory_utilization` is a share of each GPU, `cpu_memory_utilization` one of the
    machine's memory over all groups; both hold weights, buffers and KV pool; `kv_memory` goes before them.
    `threads` is per rank; None: one on a GPU, on a CPU the physical cores divided by all ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())

    model: Text = DEFAULT_MODEL
    revision: Text | None = None
    served_model_names: Names = ()
    service_name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "tidegate"

    tensor_parallel_size: Count = 1
    groups: Count = 1
    ingress_replicas: Count = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Dtype = "auto"
    threads: Count | None = None

    allow_remote: Switch = False
    host: Text = "127.0.0.1"
    port: Annotated[StrictInt, Field(ge=1, le=65_535)] = 8000
    body_limit: Size = 8 * 2**20
    drain_s: Seconds = 30.0

    block_size: StrictInt = 32
    kv_precision: Dtype = "auto"
    kv_memory: Size | None = None
    gpu_memory_utilization: Fraction = 0.9
    cpu_memory_utilization: Fraction = 0.25
    prefix_cache: Switch = True
    session_ttl_s: Seconds = 300.0
    cache_scope: Literal["auto", "tenant", "session"] = "auto"
    namespace_secret_file: Text | None = None

    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 512
    overlap: Annotated[StrictInt, Field(ge=1, le=2)] = 1

    @field_validator("served_model_names")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) != len(names):
            raise ValueError(f"names a model twice: {', '.join(names)}")
        return names

    @field_validator("block_size")
    @classmethod
    def _block_size(cls, size: int) -> int:
        if size not in _BLOCK_SIZES:
            raise ValueError(f"must be one of {', '.join(map(str, _BLOCK_SIZES))} tokens, got {size}")
        return size

    @field_validator("host")
    @classmethod
    def _host(cls, host: str, info: ValidationInfo) -> str:
        if not is_loopback(host) and info.data.get("allow_remote") is False:
            raise ValueError(
                f"{host} can be reached from other machines, and there are no API keys yet; "
                "set allow_remote: true if that is meant, or use 127.0.0.1"
            )
        return host

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _step_budget(cls, tokens: int, info: ValidationInfo) -> int:
        for key, why in (
            ("block_size", "a step must be able to fill a block"),
            ("max_num_seqs", "every running request takes one token of a step"),
        ):
            least = info.data.get(key)
            if least is not None and tokens < least:
                raise ValueError(f"must be at least {key} ({least}), got {tokens}: {why}")
        return tokens

    @property
    def names(self) -> tuple[str, ...]:
        """The names clients may use: `served_model_names`, else the model's own (a folder's last part)."""
        if self.served_model_names:
            return self.served_model_names
        is_path = self.model.startswith(("/", ".", "~"))
        return (Path(self.model).expanduser().resolve().name if is_path else self.model,)

    @property
    def ranks(self) -> int:
        """Ranks of all groups together."""
        return self.groups * self.tensor_parallel_size

    def group_settings(self, model_dir: Path, revision: str, *, device: str, cores: int) -> GroupSettings:
        """What each group is told. `device` is "cpu" or "cuda" (the caller has resolved "auto"); `cores` are the
        physical cores of a node that its ranks share."""
        on_gpu = device == "cuda"
        return GroupSettings(
            model_dir=str(model_dir),
            model_names=self.names,
            revision=revision,
            tensor_parallel_size=self.tensor_parallel_size,
            dtype=self.dtype,
            kv_precision=self.kv_precision,
            device=device,
            block_size=self.block_size,
            kv_memory=self.kv_memory,
            memory_fraction=self.gpu_memory_utilization if on_gpu else self.cpu_memory_utilization / self.ranks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_cache=self.prefix_cache,
            session_ttl_s=self.session_ttl_s,
            overlap=self.overlap,
            threads=self.threads or (1 if on_gpu else max(1, cores // self.ranks)),
        )

    def ingress_settings(self, model_dir: Path, revision: str, environment: Environment) -> IngressSettings:
        """What each ingress replica is told."""
        return IngressSettings(
            model_dir=str(model_dir),
            model_names=self.names,
            revision=revision,
            service=self.service_name,
            secret_file=self.namespace_secret_file or environment.namespace_secret_file,
            cache_scope=self.cache_scope,
            session_ttl_s=self.session_ttl_s,
            body_limit=self.body_limit,
            max_model_len=self.max_model_len,
            drain_s=self.drain_s,
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that Tidegate reads: TIDEGATE_CACHE (folder for models, default ~/.cache/tidegate) and
    TIDEGATE_NAMESPACE_SECRET_FILE (file that keys the prefix cache's namespaces)."""

    cache: Path
    namespace_secret_file: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Read `variables` (the process's own by default)."""
        cache = variables.get("TIDEGATE_CACHE") or "~/.cache/tidegate"
        return cls(Path(cache).expanduser(), variables.get("TIDEGATE_NAMESPACE_SECRET_FILE") or None)


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
    key = str(fault["loc"][0]) if fault["loc"] else ""
    where = f"--{key.replace('_', '-')}" if key in given else document.where(key)
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, ClusterConfig.model_fields, n=1, cutoff=0.5)
        return f"{where}: {path}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if fault["type"] == "value_error":
        return f"{where}: {path}: {fault['ctx']['error']}"
    return f"{where}: {path}: {fault['msg'][:1].lower()}{fault['msg'][1:]}, got {fault['input']!r}"
