"""The native kernels' debug build under sanitizers: they see a planted fault, and find none in the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.sanitized import environment
from workers.native.build import SOURCES
from workers.native.processor import Processor

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
BEST, *OTHERS = (variant.name for variant in Processor.read().variants)
TESTS = ("native_linear", "native_attention", "native_rules", "native_refusals", "native_sampler", "shared_reduce")

PLANTED = """
extern "C" int tg_read(const float* x, int at, float* out) { *out = x[at]; return 0; }
extern "C" int tg_add(int x) { return x + 2147483647; }
extern "C" int tg_checked(int fault) {
#ifdef TG_CHECKS
    return fault;
#else
    return 0;
#endif
}
"""
PROGRAM = """
import sys
from ctypes import c_int, c_void_p
from pathlib import Path
import torch
from workers.native.library import load_library
library = load_library(Path(sys.argv[1]), variant="plain", debug=True, sources=Path(sys.argv[2]))
x, out = torch.ones(1000), torch.zeros(1)
read = library.function("tg_read", c_void_p, c_int, c_void_p)
assert not read(x.data_ptr(), 999, out.data_ptr()) and out == 1
assert library.function("tg_checked", c_int)(3) == 3
print("so far clean", flush=True)
if sys.argv[3] == "read":
    read(x.data_ptr(), 1000, out.data_ptr())
else:
    library.function("tg_add", c_int)(1)
print("reached the end")
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["nice", sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment()})


@pytest.mark.parametrize(("fault", "says"), [("read", "heap-buffer-overflow"), ("overflow", "signed integer overflow")])
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str, says: str) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("threads.cpp", "threads.h"):
        shutil.copy(SOURCES / name, sources / name)
    (sources / "planted.cpp").write_text(PLANTED)
    done = run("-c", PROGRAM, tmp_path / "cache", sources, fault)
    assert done.stdout == "so far clean\n", done.stderr
    assert done.returncode != 0 and says in done.stderr


@pytest.mark.parametrize("variant", [BEST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_kernels_are_clean(variant: str) -> None:
    done = run("-m", "tests.model.sanitized", variant)
    assert done.returncode == 0 and done.stdout.endswith("all clean\n"), done.stdout + done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["native_linear", "native_attention", "native_rules", "native_refusals", "native_sampler", "shared_reduce"]
)
def test_the_kernels_own_tests_are_clean(name: str) -> None:
    """Those of one build. int8 products are compared to the bit, which takes the release build's fused sums."""
    wanted = f"({BEST} or not ({' or '.join(OTHERS) or 'nothing'}))"
    if name == "native_linear":
        wanted += " and not int8"
    plugins = ("-p", "tests.model.sanitized", "-p", "no:cacheprovider")
    done = run("-m", "pytest", "-q", "-x", *plugins, "-k", wanted, f"tests/model/test_{name}.py")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
