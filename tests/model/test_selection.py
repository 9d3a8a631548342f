"""Which kernels are chosen where, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.layout import KVLayout, LayerKV, Precision
from tests.model.tiny import FAMILIES, save_model
from workers.models.spec import Unsupported
from workers.native.library import NativeUnavailable
from workers.native.pairs import PAIRS, layout_fault
from workers.native.processor import Processor
from workers.rank import Rank, RankFacts
from workers.selection import Choice, Wish, choose_kernels
from workers.settings import GroupSettings

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
SLOW = Processor("Slow CPU", frozenset())


def layout(
    precision: Precision = Precision.BF16, block_size: int = 16, head_dim: int = 64, value: Precision | None = None
) -> KVLayout:
    return KVLayout(block_size, (LayerKV.pair(2, head_dim, precision, value),) * 2)


def choose(dtype: str = "bf16", device: torch.device = CPU, shape: KVLayout | None = None, **wish: Any) -> Choice:
    return choose_kernels(dtype, device, shape or layout(), Wish(**wish))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Processor], None]:
    def pretend(found: Processor) -> None:
        monkeypatch.setattr("workers.selection.Processor.read", lambda: found)

    return pretend


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NativeUnavailable("no C++ compiler")

    monkeypatch.setattr("workers.selection.load_library", refuse)


def test_bf16_on_a_cpu_is_native() -> None:
    best = Processor.read().variants[0].name
    choice = choose()
    assert choice.kernels.name == f"native-{best}" and not choice.second_best
    assert Processor.read().name in choice.why
    assert (choice.kernels.dtype, choice.kernels.stream) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_weights_keep_their_precision(dtype: str) -> None:
    choice = choose(dtype, shape=layout(Precision.parse(dtype)))
    assert choice.kernels.name == "onednn-fp32" and choice.kernels.dtype == torch.float32
    assert dtype in choice.why and not choice.second_best


def test_a_gpu_computes_in_the_weights_format() -> None:
    choice = choose("fp16", torch.device("cuda"))
    assert (choice.kernels.name, choice.why) == ("torch-fp16", "device cuda")


def test_a_cpu_without_vectors_is_left_to_onednn(processor: Callable[[Processor], None]) -> None:
    processor(SLOW)
    choice = choose()
    assert choice.kernels.name.startswith("onednn-") and not choice.second_best
    assert "Slow CPU has neither AVX512 nor AVX2" in choice.why


@pytest.mark.usefixtures("broken")
def test_kernels_that_cannot_be_had_are_replaced_with_a_reason() -> None:
    choice = choose()
    assert choice.kernels.name.startswith("onednn-") and choice.second_best
    assert choice.why == "native kernels cannot be had: no C++ compiler"
    for wish in ({"kernels": "native"}, {"weight_precision": "int8"}, {"kernels": "native-avx2"}):
        with pytest.raises(Unsupported, match=r"native kernels cannot be had: no C\+\+ compiler"):
            choose(**wish)


CHANNEL = Precision.INT4_CHANNEL


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (layout(Precision.FP32), "kv_precision fp32 is none of bf16, fp16, int8, fp8_e4m3, fp8_e5m2, int4"),
        (layout(Precision.INT4, value=Precision.INT8), "no kernels for keys in int4 with values in int8"),
        (KVLayout(16, (LayerKV.latent(64, 16, Precision.BF16),)), "MLA's latents are read by torch alone"),
        (layout(block_size=4), "block_size 4 is no multiple of 16"),
        (layout(CHANNEL, 32, value=Precision.INT4), "int4_channel need a block_size of a multiple of 64, got 32"),
        (layout(CHANNEL, 64, value=Precision.INT8), "no kernels for keys in int4_channel with values in int8"),
        (layout(head_dim=24), "heads of 24"),
        (layout(head_dim=272), "heads of 272"),
    ],
)
def test_pages_that_the_native_attention_cannot_read(shape: KVLayout, says: str) -> None:
    assert says in layout_fault(shape)
    choice = choose(shape=shape)
    assert choice.kernels.name.startswith("onednn-") and choice.second_best and says in choice.why
    with pytest.raises(Unsupported, match=says):
        choose(shape=shape, kernels="native")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_pages_that_it_can(pair: tuple[Precision, Precision], head_dim: int) -> None:
    key, value = pair
    assert layout_fault(layout(key, 64, head_dim, value)) == ""


@pytest.mark.parametrize("name", ["torch-fp32", "torch-bf16", "torch-fp16", "onednn-fp32"])
def test_exact_names_are_taken_at_their_word(name: str) -> None:
    choice = choose(kernels=name)
    assert (choice.kernels.name, choice.why) == (name, "as configured")


@pytest.mark.parametrize("variant", [variant.name for variant in Processor.read().variants])
def test_every_native_variant_can_be_asked_for(variant: str) -> None:
    assert choose(kernels=f"native-{variant}").kernels.name == f"native-{variant}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kinds_choose_within_themselves(dtype: str) -> None:
    assert choose(dtype, kernels="torch").kernels.name == f"torch-{dtype}"
    assert choose(dtype, kernels="onednn").kernels.name in (f"onednn-{dtype}", "onednn-fp32")


def test_int8_weights_are_native() -> None:
    assert choose(weight_precision="int8").kernels.name.endswith("-int8")
    with pytest.raises(Unsupported, match="needs kernels: native"):
        choose(weight_precision="int8", kernels="onednn")
    with pytest.raises(Unsupported, match="not on cuda"):
        choose(weight_precision="int8", device=torch.device("cuda"))


@pytest.mark.parametrize("wish", [{"kernels": "fast"}, {"kernels": "auto-fast"}, {"kernels": "native-fast"}])
def test_unknown_kernels_are_refused_by_name(wish: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="fast"):
        choose(**wish)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="'int4'"):
        choose(weight_precision="int4")
    with pytest.raises(ValueError, match="'fp64'"):
        choose("fp64")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(FAMILIES["mistral"], folder)
    return folder


def loaded(folder: Path, **changes: Any) -> RankFacts:
    settings = GroupSettings(str(folder), ("m",), dtype="bf16", kv_memory=2**20, block_size=16, threads=1)
    return Rank(0, replace(settings, **changes)).load(None, "127.0.0.1")


def test_a_rank_says_what_it_computes_with(tiny: Path, one_thread: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "workers.rank")
    best = Processor.read().variants[0].name
    facts = loaded(tiny)
    assert facts.kernel == f"native-{best}" and facts.kernel_why.startswith("the fastest for")
    assert loaded(tiny, kernels="onednn").kernel.startswith("onednn-")
    first, second = (record.getMessage() for record in caplog.records)
    assert f"native-{best}" in first and "onednn" in second and "as configured" in second


@pytest.mark.usefixtures("broken")
def test_a_rank_warns_of_slower_kernels_in_one_line(
    tiny: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    facts = loaded(tiny)
    assert facts.kernel.startswith("onednn-") and facts.kernel_why == "native kernels cannot be had: no C++ compiler"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().endswith(f"{facts.kernel}: {facts.kernel_why}")


def test_compiled_kernels_are_kept_where_the_group_is_told(
    tiny: Path, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def note(folder: Path, *_: object, **__: object) -> None:
        asked.append(folder)
        raise NativeUnavailable("only asking")

    monkeypatch.setattr("workers.native.library.built", note)
    loaded(tiny, native_dir=str(tmp_path))
    assert set(asked) == {tmp_path}


def test_the_library_computes_with_as_many_threads_as_torch(one_thread: None) -> None:
    from workers.native.library import load_library

    choose()
    assert load_library().threads == 1
