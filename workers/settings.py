"""What one group is told when it is built. Frozen, plain values that travel to its ranks.

Knows neither YAML nor environment variables nor other groups: `deploy.config` makes one from the operator's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from kvstore.precisions import AUTOMATIC, PrecisionMap

KERNELS = ("auto", "native", "onednn", "torch")
"""Kinds of kernels by name; "auto" is the fastest that the device, the CPU and the weights allow."""
STREAMS = ("socket", "ray")
"""How events reach the ingresses."""
WEIGHT_PRECISIONS = ("auto", "int8")
"""How linears keep their weights: in `dtype`, or quantised."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One tensor-parallel group.

    `model_dir` is a folder with config.json, safetensors and tokenizer.json, readable on every rank's node.
    `model_names` are the names that clients may use, the canonical one first; `revision` identifies the weights.
    `dtype` is "auto", "bf16", "fp16" or "fp32"; in `kv_precision` "auto" stands for that; `device` is "cpu" or
    "cuda". `kernels` is one of KERNELS, `weight_precision` one of WEIGHT_PRECISIONS; `native_dir` caches the native
    kernels that were compiled (None: a folder of the user's); `checks_dir` remembers which models have passed their
    check against transformers (None: it is done at every start).
    `kv_memory` is the KV pool in bytes *per rank* (the rank that holds most heads sets the block count). None: what
    weights and the largest step's buffers leave of `memory_fraction` of the device's memory, which is one rank's share
    of its GPU, or on a CPU of the machine's memory (of its cgroup limit where there is one).
    `max_model_len` None: the model's own context. `overlap` is the number of steps in flight (1 or 2).
    `streams` is one of STREAMS: over a socket of rank 0, not encrypted, or through Ray's calls; `stream_pace_s`: how
    far apart messages to an ingress are at least.
    `threads` is per rank; None leaves the choice to torch. A step that takes longer than `step_timeout_s` is a hang:
    the group is ended and built anew. `flight_dir` is where its last plans and stacks are written when it dies (None:
    Ray's log folder).
    """

    model_dir: str
    model_names: tuple[str, ...]
    revision: str = ""
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_precision: PrecisionMap = AUTOMATIC
    device: str = "cpu"
    kernels: str = "auto"
    weight_precision: str = "auto"
    native_dir: str | None = None
    checks_dir: str | None = None
    block_size: int = 32
    kv_memory: int | None = None
    memory_fraction: float = 0.25
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefix_cache: bool = True
    session_ttl_s: float = 300.0
    overlap: int = 1
    streams: str = "socket"
    stream_pace_s: float = 0.02
    threads: int | None = None
    step_timeout_s: float = 60.0
    flight_dir: str | None = None

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Self:
        """The settings that `plain` says."""
        names, precision = tuple(plain["model_names"]), PrecisionMap.parse(plain["kv_precision"])
        return cls(**{**plain, "model_names": names, "kv_precision": precision})

    @property
    def ahead(self) -> int:
        """The most tokens of one sequence that may be on their way at once."""
        return self.overlap * self.max_num_batched_tokens

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has them, for a process that Ray does not start."""
        return asdict(self) | {"kv_precision": self.kv_precision.plain}
