"""Processor: what this machine's CPU can execute, and which builds of the native library follow from that.

Knows neither a compiler nor a kernel.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variant:
    """A build of the library with compiler `flags`, for processors that have all of `features` (Linux's names)."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c", "avx2")
_WIDE = ("-mprefer-vector-width=512",)


def _variant(name: str, features: tuple[str, ...], *more: str) -> Variant:
    flags = tuple(f"-m{feature.replace('_', '')}" for feature in features)
    return Variant(name, frozenset(features), flags + more)


VARIANTS = (
    _variant("avx512bf16", (*_AVX512, "avx512_vnni", "avx512_bf16"), *_WIDE),
    _variant("avx512", _AVX512, *_WIDE),
    _variant("avx2", ("avx2", "fma", "f16c")),
    _variant("plain", ()),
)
"""Fastest first. The last one runs anywhere."""


@dataclass(frozen=True, slots=True)
class Processor:
    """`name` and `features` of the CPU as Linux tells them; elsewhere no feature is known."""

    name: str
    features: frozenset[str]

    @classmethod
    def read(cls, cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
        """This machine's first CPU; the kernel lists only what it and its hypervisor let a program use."""
        try:
            text = cpuinfo.read_text(errors="replace")
        except OSError:
            text = ""
        found: dict[str, str] = {}
        for line in text.split("\n\n", 1)[0].splitlines():
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
        return cls(found.get("model name") or platform.machine(), frozenset(found.get("flags", "").split()))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those that this CPU can execute, fastest first; never empty."""
        return tuple(variant for variant in VARIANTS if variant.features <= self.features)


def variant_named(name: str) -> Variant:
    """Raises ValueError for a name that is none of VARIANTS."""
    for variant in VARIANTS:
        if variant.name == name:
            return variant
    raise ValueError(f"variant {name!r} is none of {', '.join(variant.name for variant in VARIANTS)}")
