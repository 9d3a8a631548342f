"""Which builds of the native library a CPU can execute, from what Linux says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.native.processor import VARIANTS, Processor, variant_named

SAPPHIRE = "fpu sse2 fma f16c avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 amx_tile"
CASCADE = "fpu sse2 fma f16c avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni"
HASWELL = "fpu sse2 fma f16c avx2"
KNIGHTS = "fpu sse2 fma f16c avx2 avx512f avx512cd avx512er"


def read(folder: Path, flags: str, name: str = "Some CPU @ 2.0GHz: fast") -> Processor:
    path = folder / "cpuinfo"
    other = "processor : 1\nmodel name : Other\nflags : none\n"
    path.write_text(f"processor\t: 0\nmodel name\t: {name}\nflags\t\t: {flags}\nbogomips\t: 1\n\n{other}")
    return Processor.read(path)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (SAPPHIRE, ["avx512bf16", "avx512", "avx2", "plain"]),
        (CASCADE, ["avx512", "avx2", "plain"]),
        (HASWELL, ["avx2", "plain"]),
        (KNIGHTS, ["avx2", "plain"]),
        (HASWELL.replace("f16c", ""), ["plain"]),
        ("", ["plain"]),
    ],
)
def test_variants_are_what_the_cpu_can_execute_fastest_first(tmp_path: Path, flags: str, names: list[str]) -> None:
    processor = read(tmp_path, flags)
    assert [variant.name for variant in processor.variants] == names
    assert processor.name == "Some CPU @ 2.0GHz: fast"


def test_a_machine_that_tells_nothing_runs_the_plain_build(tmp_path: Path) -> None:
    processor = Processor.read(tmp_path / "absent")
    assert [variant.name for variant in processor.variants] == ["plain"] and processor.name


def test_the_real_machine_is_read() -> None:
    assert Processor.read().variants[-1] is VARIANTS[-1]


def test_flags_are_those_that_gcc_knows() -> None:
    flags = {flag for variant in VARIANTS for flag in variant.flags}
    assert {"-mavx512bf16", "-mavx512vnni", "-mf16c", "-mfma"} <= flags
    assert not any("_" in flag for flag in flags)
    assert variant_named("plain").flags == ()


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="'sse9' is none of avx512bf16, avx512, avx2, plain"):
        variant_named("sse9")
