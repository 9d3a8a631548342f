"""Library: the native kernels as ctypes functions. It knows how they are found and loaded, not what they compute."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from workers.native.build import SOURCES, CacheUnusable, NativeUnavailable, Part, built
from workers.native.processor import Processor, variant_named

__all__ = ["CACHE", "Library", "NativeUnavailable", "load_library", "load_object", "openmp_runtimes"]

CACHE = Path("~/.cache/tidegate/native")
_OPENMP = ("libgomp", "libiomp5", "libomp")
"""All of them answer to the names that GCC calls."""


class Library:
    """The loaded shared library. `variant`: for which processor it was compiled; `debug`: with checks and sanitizers;
    `threads`: OpenMP threads of every parallel region in it, at first torch's number."""

    def __init__(
        self,
        loaded: ctypes.CDLL,
        variant: str,
        *,
        debug: bool = False,
        open_part: Callable[[Part], ctypes.CDLL] | None = None,
    ) -> None:
        self._loaded = loaded
        self._open_part = open_part
        self.variant = variant
        self.debug = debug
        self._set_threads = self.function("tg_set_threads", ctypes.c_int)
        self._threads = self.function("tg_threads")
        self.threads = torch.get_num_threads()

    def function(self, name: str, *kinds: type) -> Callable[..., int]:
        """The C function `name` with arguments of ctypes types `kinds`. A call gives up the GIL and returns a C int:
        0, or a code that tells what was wrong. Raises AttributeError for a name that the library does not have."""
        found = self._loaded[name]  # an object of its own, so that two callers may declare different types
        found.argtypes = kinds
        found.restype = ctypes.c_int
        return found

    def part(self, part: Part) -> ctypes.CDLL:
        """A part of the library, compiled at first use. Raises NativeUnavailable."""
        if self._open_part is None:
            raise NativeUnavailable(f"this library has no parts, so no {part.name}")
        return self._open_part(part)

    @property
    def threads(self) -> int:
        """What a parallel region gets, as OpenMP counts it."""
        return self._threads()

    @threads.setter
    def threads(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
        self._set_threads(count)


def load_library(
    folder: Path | None = None,
    *,
    variant: str | None = None,
    debug: bool = False,
    sources: Path = SOURCES,
    parts: Sequence[Part] = (),
) -> Library:
    """The library for this processor, or that called `variant`, compiled at first use into `folder` (None: the user's
    cache), and beside it the `parts` that will be wanted. `debug`: with bounds checks and sanitizers, for a process
    that has libasan preloaded. One object per process and kind. Raises NativeUnavailable, which says why, and
    ValueError for an unknown variant."""
    known = Processor.read().variants
    wanted = variant_named(variant) if variant else known[0]
    if wanted not in known:
        raise NativeUnavailable(f"this CPU cannot execute {variant}, only {', '.join(each.name for each in known)}")
    kind = (folder or CACHE).expanduser(), wanted.name, debug, sources
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        opened = [pool.submit(_open, *kind, part) for part in parts]
        library = _load(*kind)
        for each in opened:
            each.result()
    return library


def openmp_runtimes() -> tuple[str, ...]:
    """Paths of the OpenMP runtimes that this process has loaded: one, or threads of two would fight for the cores."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps}
    return tuple(sorted(path for path in mapped if Path(path).name.startswith(_OPENMP)))


@functools.cache
def _load(folder: Path, variant: str, debug: bool, sources: Path) -> Library:
    open_part = functools.partial(_open, folder, variant, debug, sources)
    return Library(open_part(None), variant, debug=debug, open_part=open_part)


@functools.cache
def _open(folder: Path, variant: str, debug: bool, sources: Path, part: Part | None) -> ctypes.CDLL:
    kind = variant_named(variant)
    try:
        return load_object(built(folder, kind, part, debug=debug, sources=sources))
    except CacheUnusable:
        with tempfile.TemporaryDirectory() as name:  # what is loaded stays, whatever becomes of the file
            return load_object(built(Path(name), kind, part, debug=debug, sources=sources))


def load_object(path: Path) -> ctypes.CDLL:
    """Raises NativeUnavailable when the system's loader refuses `path`."""
    try:
        _share_openmp()
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the compiled library does not load: {error}") from error


def _share_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to the library, which is linked with none of its own."""
    found = openmp_runtimes()
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
