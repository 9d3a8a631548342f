"""The engine alone under a closed loop, step by step, and the loops that measure what a machine can do at most."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.bench import peaks, solo
from deploy.bench.peaks import Measured, PeakMeter
from deploy.bench.solo import Format, Job
from tests.model.tiny import FAMILIES, save_model
from workers.native.library import Library, NativeUnavailable, load_library
from workers.native.processor import VARIANTS, Processor
from workers.settings import GroupSettings

HERE = [variant.name for variant in Processor.read().variants]
_CHAINS = 12


def library(variant: str) -> Library:
    if variant not in HERE:
        pytest.skip(f"this CPU cannot execute {variant}")
    try:
        return load_library(variant=variant)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of a moment: here it only matters that there are some."""
    for name, value in (("READ_BYTES", 2**20), ("_ROUNDS", 1000), ("_BURSTS", 2), ("_PASSES", 2), ("_SIDE", 32)):
        monkeypatch.setattr(peaks, name, value)


@pytest.mark.parametrize("variant", [variant.name for variant in VARIANTS])
def test_multiply_adds_are_counted_and_kinds_without_instructions_said(variant: str) -> None:
    native = library(variant)
    add = native.function("tg_peak_multiply_add", ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
    done = ctypes.c_int64(-1)
    has = {0} | ({1, 2} if variant == "avx512bf16" else set())
    lanes = {"avx512bf16": 16, "avx512": 16, "avx2": 8, "plain": 4}[variant]
    for kind, width in ((0, lanes), (1, 32), (2, 64)):
        done.value = -1
        assert add(kind, 100, ctypes.byref(done)) == (0 if kind in has else 1)
        assert done.value == (native.threads * 100 * _CHAINS * width * 2 if kind in has else -1)
    assert add(3, 100, ctypes.byref(done)) == 1


@pytest.mark.parametrize("variant", [variant.name for variant in VARIANTS])
def test_every_word_is_read_once(variant: str) -> None:
    read = library(variant).function("tg_peak_read", ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64))
    words = torch.arange(1, 10_008, dtype=torch.int64)
    total = ctypes.c_uint64()
    for count in (0, 1, 7, 10_007):
        assert read(words.data_ptr(), count, ctypes.byref(total)) == 0
        assert total.value == count * (count + 1) // 2


@pytest.mark.parametrize("variant", [None, *(variant.name for variant in VARIANTS)])
def test_a_meter_gives_rates_with_and_without_the_library(variant: str | None, quick: None) -> None:
    found = PeakMeter(library(variant) if variant else None)()
    assert "fp32" in found.operations and ("int8" in found.operations) == (variant == "avx512bf16")
    assert all(rate > 0 for rate in (*found.operations.values(), found.read))


@pytest.mark.parametrize(
    ("kernels", "form"),
    [
        ("native-avx512bf16", Format("bf16", "bf16", 2)),
        ("native-avx2", Format("fp32", "fp32", 2)),
        ("native-avx512bf16-int8", Format("int8", "bf16", 1)),
        ("native-plain-int8", Format("int8", "fp32", 1)),
        ("onednn-bf16", Format("bf16", "bf16", 2)),
        ("onednn-fp32", Format("fp32", "fp32", 4)),
    ],
)
def test_kernels_are_held_against_their_own_format(kernels: str, form: Format) -> None:
    assert Format.of(kernels) == form


def test_peaks_are_means_and_what_has_no_instructions_runs_in_fp32() -> None:
    before, after = Measured({"fp32": 1.0}, 10.0), Measured({"fp32": 3.0}, 30.0)
    found = Format("int8", "bf16", 1).peaks(before, after)
    assert (found.linear, found.other, found.read) == (2.0, 2.0, 20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_model(FAMILIES["smollm2"], made)
    return made


def test_a_closed_loop_is_told_step_by_step(folder: Path, quick: None, one_thread: None) -> None:
    settings = GroupSettings(
        str(folder),
        ("tiny",),
        kernels="torch",
        threads=1,
        block_size=16,
        kv_memory=2**22,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    job = {"settings": settings.plain, "levels": (1, 3), "prompt_tokens": 40, "max_tokens": 5, "seed": 3}
    found = json.loads(json.dumps(solo.run(Job(**json.loads(json.dumps(job))))))
    assert found["kernels"] == "torch-fp32" and found["threads"] == 1
    one, three = found["levels"]
    check_level(one, requests=8)
    check_level(three, requests=12)
    assert one["phases"]["decode"]["steps"] == 8 * 4, "the first token comes with the last chunk of the prompt"
    assert three["phases"]["decode"]["steps"] < 12 * 4, "rows share steps"


def check_level(level: dict[str, Any], *, requests: int) -> None:
    *parts, whole = level["phases"].values()
    assert whole["sampled"] == sum(part["sampled"] for part in parts) == 5 * requests
    assert whole["tokens"] == sum(part["tokens"] for part in parts) > 5 * requests
    assert 0 < sum(part["seconds"] for part in parts) <= whole["seconds"]
    assert whole["least_s"] == pytest.approx(sum(part["least_s"] for part in parts))
    assert all(part["least_s"] > 0 for part in parts)
    assert 0 < level["ttft_s"] < whole["seconds"]
