"""Compiles native kernels ahead of their first use, for processors that need not be this one: a program,
`python -m workers.native.prebuild FOLDER`. What it leaves in FOLDER is found there where no compiler is: an image that
was built with one runs without. Knows nothing of who will load it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.native.build import SOURCES, NativeUnavailable, Part, built
from workers.native.pairs import PAIRS, part_named
from workers.native.processor import VARIANTS, Variant, variant_named

_X86 = ("x86_64", "AMD64")


def variants_here(machine: str | None = None) -> tuple[Variant, ...]:
    """Those that a compiler on `machine` (None: this one) makes code for, fastest first."""
    fits = (machine or platform.machine()) in _X86
    return VARIANTS if fits else tuple(variant for variant in VARIANTS if not variant.features)


def prebuild(
    folder: Path, variants: Sequence[Variant], parts: Sequence[Part], *, sources: Path = SOURCES
) -> tuple[Path, ...]:
    """The library and `parts` of it for each of `variants`, in `folder`. Raises NativeUnavailable."""
    wanted: tuple[Part | None, ...] = (None, *parts)
    return tuple(built(folder, variant, part, sources=sources) for variant in variants for part in wanted)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and print the name of each shared object."""
    options = _parser().parse_args(arguments)
    try:
        variants = [variant_named(name) for name in options.variant] or variants_here()
        parts = [part_named(name) for name in options.pair or (f"{key.label}-{value.label}" for key, value in PAIRS)]
        for made in prebuild(options.folder, variants, parts):
            print(made.name)
    except (NativeUnavailable, ValueError) as error:
        sys.exit(f"prebuild: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.native.prebuild", description="Compile native kernels.")
    parser.add_argument("folder", type=Path, help="the native folder of a TIDEGATE_CACHE")
    parser.add_argument("--variant", action="append", default=[], help="of the processor; default: all of this machine")
    parser.add_argument("--pair", action="append", default=[], help="keys and values, as int8-int4; default: all")
    return parser


if __name__ == "__main__":
    main()
