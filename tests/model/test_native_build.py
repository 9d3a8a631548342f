"""The native library: compiled once, whoever asks; cached, repaired, refused in one line; one OpenMP runtime."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.native.build import SOURCES, CacheUnusable, Compiler, NativeUnavailable, Part, built, is_whole
from workers.native.library import Library, load_library, load_object
from workers.native.pairs import part_named
from workers.native.prebuild import main, prebuild, variants_here
from workers.native.processor import VARIANTS, Processor, variant_named

pytestmark = pytest.mark.model

PLAIN = variant_named("plain")
ROOT = Path(__file__).resolve().parents[2]
GCC = Compiler.find()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library of one small unit, which takes no time to compile."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("threads.cpp", "threads.h"):
        shutil.copy(SOURCES / name, folder / name)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the compiler has linked a library; it writes that down."""
    log = tmp_path / "calls"
    tool(tmp_path / "bin" / "g++", f'case "$*" in *-shared*) echo linked >> {log};; esac\nexec {GCC.path} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def tool(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def in_a_process(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


# -- variants ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [variant.name for variant in Processor.read().variants])
def test_every_variant_that_this_cpu_can_execute_loads(variant: str, sources: Path, cache: Path) -> None:
    library = load_library(cache, variant=variant, sources=sources)
    bits = {"avx512bf16": 512, "avx512": 512, "avx2": 256, "plain": 0}
    assert library.variant == variant and library.function("tg_vector_bits")() == bits[variant]


def test_without_a_word_the_fastest_is_loaded(sources: Path, cache: Path) -> None:
    assert load_library(cache, sources=sources).variant == Processor.read().variants[0].name


def test_a_variant_that_this_cpu_cannot_execute_is_refused(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Processor("Old CPU", frozenset({"sse2"}))
    monkeypatch.setattr("workers.native.library.Processor.read", lambda: old)
    with pytest.raises(NativeUnavailable, match="cannot execute avx2, only plain"):
        load_library(cache, variant="avx2", sources=sources)
    assert load_library(cache, sources=sources).variant == "plain"


# -- cache -------------------------------------------------------------------------------------------------------------


def test_what_is_compiled_is_kept(sources: Path, cache: Path, calls: Callable[[], int]) -> None:
    first = built(cache, PLAIN, sources=sources)
    assert built(cache, PLAIN, sources=sources) == first and calls() == 1
    assert is_whole(first) and not list(cache.glob("build-*"))


def test_another_source_flag_or_compiler_is_another_library(
    sources: Path, cache: Path, tmp_path: Path, calls: Callable[[], int]
) -> None:
    made = {built(cache, PLAIN, sources=sources), built(cache, PLAIN, sources=sources, debug=True)}
    header = sources / "threads.h"
    header.write_text(header.read_text() + "// another word\n")
    made.add(built(cache, PLAIN, sources=sources))
    tool(tmp_path / "bin" / "g++", f'[ "$1" = -dumpfullversion ] && echo 13.0.1 || exec {GCC.path} "$@"')
    made.add(built(cache, PLAIN, sources=sources))
    assert len(made) == 4 and all(map(is_whole, made)) and calls() == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "replaced"])
def test_a_damaged_library_is_built_anew(sources: Path, cache: Path, calls: Callable[[], int], damage: str) -> None:
    path = built(cache, PLAIN, sources=sources)
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
        "replaced": b"not a library at all" * 10,
    }
    path.write_bytes(damaged[damage])
    assert built(cache, PLAIN, sources=sources) == path and calls() == 2
    assert Library(load_object(path), "plain").threads >= 1


def test_ranks_that_start_at_once_compile_once(sources: Path, cache: Path, calls: Callable[[], int]) -> None:
    program = (
        "import sys; from pathlib import Path; from workers.native.build import *; "
        "from workers.native.processor import variant_named as named; "
        "print(built(Path(sys.argv[1]), named('plain'), sources=Path(sys.argv[2])))"
    )
    started = [in_a_process(program, cache, sources) for _ in range(4)]
    assert len(set(map(output, started))) == 1 and calls() == 1


def test_one_that_was_killed_while_compiling_holds_up_nobody(sources: Path, cache: Path, tmp_path: Path) -> None:
    slow, ready = tmp_path / "slow", tmp_path / "ready"
    tool(slow / "g++", f'[ "$1" = -std=c++17 ] && {{ touch {ready}; exec sleep 60; }}; exec {GCC.path} "$@"')
    program = (
        "import os, sys; from pathlib import Path; os.environ['PATH'] = sys.argv[3] + ':' + os.environ['PATH']; "
        "from workers.native.build import *; from workers.native.processor import variant_named as named; "
        "built(Path(sys.argv[1]), named('plain'), sources=Path(sys.argv[2]))"
    )
    process = in_a_process(program, cache, sources, slow)
    while not ready.exists():
        assert process.poll() is None, process.communicate()
    process.kill()
    assert is_whole(built(cache, PLAIN, sources=sources))
    process.communicate()


def test_builds_that_nobody_loads_any_more_go(sources: Path, cache: Path) -> None:
    old = built(cache, PLAIN, sources=sources)
    left = cache / "build-left"
    left.mkdir()
    (sources / "more.h").write_text("// new\n")
    second = built(cache, PLAIN, sources=sources)
    assert old.exists() and left.exists()
    for path in (old, left):
        os.utime(path, (0, 0))
    built(cache, PLAIN, sources=sources)
    assert second.exists() and not old.exists() and not left.exists()


def test_a_part_is_compiled_apart_and_once(sources: Path, cache: Path, calls: Callable[[], int]) -> None:
    """Source files of parts are none of the library's own; what is defined makes two parts of one file."""
    (sources / "attention_pair.cpp").write_text('extern "C" int tg_part() { return TG_VALUE; }\n')
    parts = [Part(name, "attention_pair.cpp", (f"TG_VALUE={value}",)) for name, value in (("one", 1), ("two", 2))]
    library = load_library(cache, variant="plain", sources=sources, parts=parts[:1])
    assert calls() == 2
    assert [library.part(part).tg_part() for part in (*parts, *parts)] == [1, 2, 1, 2]
    assert calls() == 3
    assert library.threads >= 1
    with pytest.raises(AttributeError):
        library.function("tg_part")
    with pytest.raises(NativeUnavailable, match=r"failed on attention_pair\.cpp"):
        library.part(Part("wrong", "attention_pair.cpp", ("TG_VALUE=?",)))
    with pytest.raises(NativeUnavailable, match="no parts"):
        Library(load_object(built(cache, PLAIN, sources=sources)), "plain").part(parts[0])


def test_a_wheel_carries_every_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["workers"]
    carried = {path for pattern in patterns for path in (ROOT / "workers").glob(pattern)}
    sources = {path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h")}
    assert sources and carried == sources


def test_a_folder_that_cannot_be_used_costs_the_cache_not_the_kernels(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheUnusable, match="the cache folder cannot be used"):
        built(tmp_path / "file" / "cache", PLAIN, sources=sources)
    assert load_library(tmp_path / "file" / "cache", variant="plain", sources=sources).threads >= 1


# -- compilers ---------------------------------------------------------------------------------------------------------


def test_no_compiler_is_said_so(sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(cache, PLAIN, sources=sources)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NativeUnavailable, match=r"^no C\+\+ compiler: GCC 10 or later is wanted on the PATH$"):
        load_library(tmp_path / "elsewhere", variant="plain", sources=sources)
    assert built(cache, PLAIN, sources=sources) == made, "what a compiler made before serves without one"


def test_what_was_compiled_ahead_serves_where_no_compiler_is(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "attention_pair.cpp").write_text('extern "C" int tg_part() { return 7; }\n')
    part = part_named("int8-int4")
    made = prebuild(cache, [PLAIN, variant_named("avx2")], [part], sources=sources)
    assert len({path.name for path in made}) == 4 and all(map(is_whole, made))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    library = load_library(cache, variant="plain", sources=sources)
    assert library.part(part).tg_part() == 7
    with pytest.raises(NativeUnavailable, match="no C"):
        library.part(part_named("bf16-bf16"))


def test_kernels_are_compiled_ahead_for_the_processors_of_the_machine_alone() -> None:
    assert variants_here("x86_64") == VARIANTS
    assert variants_here("aarch64") == (PLAIN,)


@pytest.mark.parametrize("words", [["--pair", "int4-int8"], ["--variant", "avx3"]])
def test_what_cannot_be_compiled_ahead_is_named(cache: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit, match=f"prebuild: .*'{words[1]}' is none of "):
        main([str(cache), *words])
    assert not cache.exists()


def test_compilers_that_will_not_do_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    tool(tmp_path / "bin" / "g++", '[ "$1" = --version ] && echo Free Software Foundation || echo 9.4.0')
    tool(tmp_path / "bin" / "c++", "echo Apple clang version 15")
    with pytest.raises(NativeUnavailable, match=r"g\+\+ is GCC 9.4.0, c\+\+ is not GCC"):
        Compiler.find()
    tool(tmp_path / "bin" / "g++-14", '[ "$1" = --version ] && echo Free Software Foundation || echo 14.2.0')
    assert Compiler.find() == Compiler(str(tmp_path / "bin" / "g++-14"), "14.2.0")


def test_a_failed_compile_is_one_line_that_says_where(sources: Path, cache: Path) -> None:
    (sources / "wrong.cpp").write_text('#include "threads.h"\nint wrong = tg::threads(1);\n')
    with pytest.raises(NativeUnavailable) as refused:
        built(cache, PLAIN, sources=sources)
    said = str(refused.value)
    assert said.startswith(f"GCC {GCC.version} failed on wrong.cpp: wrong.cpp:2") and "\n" not in said
    assert not list(cache.glob("build-*")) and not list(cache.glob("*.so"))


def test_a_name_that_is_nowhere_defined_is_found_when_the_library_loads(sources: Path, cache: Path) -> None:
    (sources / "wrong.cpp").write_text('extern "C" int tg_absent(); extern "C" int tg_here() { return tg_absent(); }\n')
    with pytest.raises(NativeUnavailable, match=r"does not load: .*tg_absent"):
        load_library(cache, variant="plain", sources=sources)


# -- threads -----------------------------------------------------------------------------------------------------------

_ONE_RUNTIME = """
import sys
from pathlib import Path
from workers.native.library import load_library, openmp_runtimes
import torch
library = load_library(Path(sys.argv[1]), variant="plain", sources=Path(sys.argv[2]))
torch.randn(300, 300) @ torch.randn(300, 300)
tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
torch.set_num_threads(5)
x = torch.randn(100_000_000 // 50)
before = tasks()
x.exp_()
torch_made = tasks() - before
library.threads = 5
count = library.threads
print(len(openmp_runtimes()), count, torch_made, tasks() - before)
"""


def test_one_openmp_runtime_serves_torch_and_the_library(sources: Path, cache: Path) -> None:
    """The threads that torch's parallel region made are those that the library's runs in: none is added."""
    runtimes, count, made_by_torch, made = map(int, output(in_a_process(_ONE_RUNTIME, cache, sources)).split())
    assert (runtimes, count) == (1, 5)
    assert made_by_torch >= 3 and made == made_by_torch


def test_threads_are_the_same_from_every_python_thread(sources: Path, cache: Path) -> None:
    """OpenMP keeps its number per calling thread; a rank loads in one thread and may step in another."""
    library = load_library(cache, variant="plain", sources=sources)
    library.threads = 3
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(library.threads))
    thread.start()
    thread.join()
    assert seen == [3]
    with pytest.raises(ValueError, match="at least 1"):
        library.threads = 0
