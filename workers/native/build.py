"""Build: the native library's shared object for one variant, compiled at first use and kept in a cache folder.

Knows compilers and files; nothing of torch, of kernels or of who asks. A cache entry is named by what went into it
(sources, flags, machine, compiler) and ends with a digest of itself, so one that was cut short is built anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workers.native.processor import Variant

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-semantic-interposition",
    "-ffp-contract=fast",
    "-Wall",
)
"""Of every build. Sums keep their order (no -ffast-math): a row's bits do not depend on how a loop is unrolled."""
RELEASE = ("-O3", "-DNDEBUG")
DEBUG = (
    "-O0",
    "-g1",
    "-fno-omit-frame-pointer",
    "-DTG_CHECKS",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
"""Bounds checks and sanitizers; the process that loads it needs libasan preloaded. Not optimised: sanitizers make
templates four times as slow to compile with -O1."""
OLDEST_GCC = 10
"""The first major version that knows the flags of every variant."""
COMPILE_TIMEOUT_S = 300.0
_COMPILERS = ("g++", "c++", *(f"g++-{version}" for version in range(20, OLDEST_GCC - 1, -1)))
_PARTS = ("attention_pair.cpp",)
"""Sources that are no part of the library itself."""
_STALE_S = 30 * 24 * 3600.0
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Part:
    """A shared object beside the library: the one source file `unit`, compiled with macros `defines` (NAME=VALUE). What
    `name` says belongs to it alone."""

    name: str
    unit: str
    defines: tuple[str, ...] = ()


class NativeUnavailable(Exception):
    """The native library cannot be had here; the message says why in one line."""


class CacheUnusable(NativeUnavailable):
    """The cache folder cannot be made or written."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """GCC at `path`; `version` as it gives it itself."""

    path: str
    version: str

    @classmethod
    def find(cls, names: Sequence[str] = _COMPILERS) -> Compiler:
        """The first of `names` on the PATH that is a GCC new enough. Raises NativeUnavailable."""
        seen = []
        for name in names:
            path = shutil.which(name)
            if not path:
                continue
            version = _gcc_version(path)
            if version and int(version.split(".")[0]) >= OLDEST_GCC:
                return cls(path, version)
            seen.append(f"{name} is {'GCC ' + version if version else 'not GCC'}")
        why = f" ({', '.join(seen)})" if seen else ""
        raise NativeUnavailable(f"no C++ compiler: GCC {OLDEST_GCC} or later is wanted on the PATH{why}")


def built(
    folder: Path, variant: Variant, part: Part | None = None, *, debug: bool = False, sources: Path = SOURCES
) -> Path:
    """The shared object of `variant`, the library or a part of it, from `folder` or compiled into it. Raises
    NativeUnavailable.

    Several processes may ask at once: one compiles, the others wait for it. Where there is no compiler, one that a
    compiler made earlier from the same sources will do (an image that was built with one, say).
    """
    units = [sources / part.unit] if part else _units(sources)
    files = sorted((*units, *sources.glob("*.h")))
    flags = (*FLAGS, *(DEBUG if debug else RELEASE), *variant.flags)
    label = f"{variant.name}-debug" if debug else variant.name
    if part:
        flags += tuple(f"-D{define}" for define in part.defines)
        label += f"-{part.name}"
    stem = f"{label}-{_sources_key(files, flags)}"
    try:
        compiler = Compiler.find()
    except NativeUnavailable:
        if earlier := next(filter(is_whole, sorted(folder.glob(f"{stem}-*.so"))), None):
            return earlier
        raise
    wanted = folder / f"{stem}-{_key(compiler.path, compiler.version)[:8]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{label}.lock"):
            if not is_whole(wanted):
                _compile(wanted, units, flags, compiler)
            wanted.touch()
            _remove_stale(folder, label, wanted.stat().st_mtime - _STALE_S)
    except OSError as error:
        raise CacheUnusable(f"the cache folder cannot be used: {error}") from error
    return wanted


def is_whole(path: Path) -> bool:
    """Whether `path` ends with the digest of what is before."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _units(sources: Path) -> list[Path]:
    return sorted(path for path in sources.glob("*.cpp") if path.name not in _PARTS)


def _sources_key(files: Sequence[Path], flags: Sequence[str]) -> str:
    contents = (part for path in files for part in (path.name, path.read_bytes()))
    return _key(platform.machine(), *flags, *contents)[:16]


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _compile(wanted: Path, units: Sequence[Path], flags: Sequence[str], compiler: Compiler) -> None:
    """Units in parallel, then the link, in a folder of its own; what comes out takes its place in one rename."""
    with tempfile.TemporaryDirectory(dir=wanted.parent, prefix="build-") as name:
        folder = Path(name)
        objects = [str(folder / f"{path.stem}.o") for path in units]

        def compile_unit(path: Path, made: str) -> None:
            _run(compiler, (*flags, "-c", str(path), "-o", made), path.name)

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(compile_unit, units, objects))
        made = folder / "linked.so"
        # Without -fopenmp, so without a libgomp of its own: whichever the process has loaded by then serves it.
        linking = [flag for flag in flags if flag != "-fopenmp"]
        _run(compiler, (*linking, "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(made)), "the library")
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.replace(wanted)


def _run(compiler: Compiler, arguments: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(
            [compiler.path, *arguments], capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"GCC {compiler.version} took over {COMPILE_TIMEOUT_S:.0f} s for {what}") from None
    if done.returncode:
        raise NativeUnavailable(f"GCC {compiler.version} failed on {what}: {_first_error(done.stderr)}")


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return re.sub(r"^\S*/", "", (errors or lines or ["it said nothing"])[0])[:300]


def _gcc_version(path: str) -> str:
    """Empty for what is not GCC: in places c++ is clang, whose OpenMP is another one than torch's."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
        if "Free Software Foundation" not in done.stdout:
            return ""
        full = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.match(r"\d+(\.\d+)*", full.stdout)
    return found.group() if found else ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold `path` against other processes; the kernel lets go when a holder dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_stale(folder: Path, label: str, before: float) -> None:
    """Remove builds of `label` that nobody has loaded since `before`, and what a killed compiler left."""
    for path in (*folder.glob(f"{label}-*.so"), *folder.glob("build-*")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= before:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
