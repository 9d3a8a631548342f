"""What would fit, and what is said about a plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from deploy.plan.modeltable import find
from deploy.plan.planner import KV_PRECISIONS, Ask, Hardware, Plan
from deploy.plan.plans import Option, advice, options, parallelism, traffic
from deploy.plan.report import both, document, lines
from kvstore.layout import Precision

GIB = 2**30


def plan(name: str, context: int, batch: int, ranks: int = 1, *, gpus: int = 8, gib: int = 80, **more: object) -> Plan:
    found = find(name)
    assert found is not None
    ask = replace(Ask(context, batch, ranks=ranks), **more)  # type: ignore[arg-type]
    return Plan(found, Hardware("gpu", gpus, gib * GIB, 0.9), ask)


def carried_out(base: Plan, option: Option) -> Plan:
    """`base` with the settings of `option`."""
    changes = dict(option.changes)
    shape = base.shape.with_window(int(changes.pop("window"))) if "window" in changes else base.shape
    devices = int(changes.pop("gpus", base.hardware.devices))
    memory = int(str(changes.pop("gpu-memory", "0GiB")).removesuffix("GiB")) * GIB
    hardware = replace(base.hardware, devices=devices, device_bytes=memory or base.hardware.device_bytes)
    if "share" in changes:
        hardware = replace(hardware, share=float(changes.pop("share")))
    names = {"tp": "ranks", "kv-precision": "kv_precision"}
    return Plan(shape, hardware, replace(base.ask, **{names.get(key, key): value for key, value in changes.items()}))


@pytest.mark.parametrize(
    "base",
    [
        plan("llama-3-70b", 131_072, 4),
        plan("llama-3-70b", 131_072, 16, 8),
        plan("llama-3-70b", 131_072, 4, 4, gpus=4),
        plan("llama-3.1-405b", 131_072, 1, 8),
        plan("deepseek-v3", 131_072, 64, 8, gib=141),
        plan("gemma-3-27b", 131_072, 4, gpus=1),
        plan("smollm2-135m", 8192, 64, gpus=1, gib=6),
    ],
    ids=lambda base: f"{base.shape.name}-{base.ask.ranks}",
)
def test_what_is_said_to_fit_does(base: Plan) -> None:
    assert not base.fits
    found = options(base)
    assert found
    for option in found:
        other = carried_out(base, option)
        assert other.fits, option.words
        assert option.needed <= option.budget == other.budget


def test_the_smallest_change_of_each_kind_is_named() -> None:
    found = {tuple(option.changes): option for option in options(plan("llama-3-70b", 131_072, 4))}
    assert found[("tp",)].changes == {"tp": 8}
    base = plan("llama-3-70b", 131_072, 16, 8)
    found = {tuple(option.changes): option for option in options(base)}
    assert found[("kv-precision",)].changes == {"kv-precision": "fp8_e4m3"}
    assert found[("context",)].changes == {"context": base.max_context}
    assert found[("batch",)].changes == {"batch": base.max_batch}


def test_a_model_that_is_larger_than_the_gpu_has_no_context_that_would_fit() -> None:
    base = plan("llama-3-70b", 4096, 1)
    assert (base.max_batch, base.max_context) == (0, 0)
    assert all("context" not in option.changes and "window" not in option.changes for option in options(base))


def test_too_few_gpus_are_said() -> None:
    base = plan("llama-3-8b", 8192, 1, 4, gpus=2)
    assert not base.fits
    assert any("takes 4 GPUs" in said for said in advice(base))
    assert [option.changes for option in options(base)] == [{"tp": 2}, {"gpus": 4}]
    assert ("DOES NOT FIT", "there are too few devices") in lines(base)


def test_on_a_cpu_a_larger_share_or_gpus() -> None:
    large, small = plan("llama-3-70b", 8192, 1), plan("smollm2-135m", 8192, 40)
    machine = Hardware("cpu", 1, 24 * GIB, 0.25)
    found = options(Plan(small.shape, machine, small.ask))
    share = next(option for option in found if "share" in option.changes)
    assert carried_out(Plan(small.shape, machine, small.ask), share).fits
    assert [option.changes for option in options(Plan(large.shape, machine, large.ask))] == [
        {"tp": 2, "gpus": 2, "gpu-memory": "80GiB"}
    ]


def test_the_pools_share_and_what_moves_it() -> None:
    low, usual, high = plan("llama-3-70b", 8192, 1, 4), plan("llama-3-70b", 8192, 1, 8), plan("llama-3-8b", 8192, 1, 8)
    assert low.pool_share < 0.6 <= usual.pool_share <= 0.8 < high.pool_share
    assert any("--tp 8 would make it" in said for said in advice(low))
    assert any("is usual)." in said for said in advice(usual))
    assert any("--tp 4 fits too" in said for said in advice(high))


def test_idle_and_copied_bytes_are_said() -> None:
    assert any("stay idle" in said for said in advice(plan("smollm2-135m", 8192, 1, 2)))
    assert any("latent is whole on every rank" in said for said in advice(plan("deepseek-v2", 8192, 1, 8)))
    assert any("ranks share a head" in said for said in advice(plan("llama-3-70b", 8192, 1, 16, gpus=16)))
    assert not any("idle" in said or "copies" in said for said in advice(plan("llama-3-70b", 8192, 1, 8)))


def test_a_context_beyond_the_models_reach_is_said() -> None:
    assert any("reach 8,192" in said for said in advice(plan("llama-3-70b", 131_072, 1, 8)))
    assert not any("reach" in said for said in advice(plan("llama-3.1-70b", 131_072, 1, 8)))


def test_what_parallelism_moves() -> None:
    moved = traffic(plan("llama-3-70b", 8192, 1, 8))
    assert moved.tensor == 2 * 2 * 7 * 8192 * 4
    assert moved.tensor_total == 80 * moved.tensor
    assert moved.pipeline == 7 * 8192 * 2
    said = " ".join(parallelism(plan("llama-3-70b", 8192, 1, 8)))
    assert "917,504 B" in said and "114,688 B" in said and "640 times" in said
    assert "nothing" in parallelism(plan("llama-3-8b", 8192, 1))[0]


def test_sizes_in_both_units() -> None:
    assert both(40 * GIB) == "42.95 GB = 40.00 GiB"
    assert both(2**20) == "1.05 MB = 1.00 MiB"


def value_of(text: str) -> int:
    """A formula's left side as a number: words are dropped but `min`, commas between thousands too."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("×", "*")
    return int(eval(re.sub(r"\b(?!min\b)[A-Za-z]+\b", "", plain)))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision)
        for name in ("gemma-2-9b", "llama-3-70b", "deepseek-v3", "deepseek-v2-mha")
        for precision in KV_PRECISIONS
        if name != "deepseek-v3" or not Precision.parse(precision).by_channel  # which MLA refuses
    ],
)
def test_the_formulas_are_right(name: str, precision: str) -> None:
    found = document(plan(name, 8192, 3, kv_precision=precision))["kv"]
    for text in found["formula"]["layers"]:
        left, right = text.split(" = ")
        assert value_of(left) == int(right.split()[0].replace(",", "")) == found["token_bytes_by_layer"][0]
    assert value_of(found["formula"]["total"].split(" = ")[0]) == found["total_bytes"]


def test_the_document_says_what_the_lines_say() -> None:
    base = plan("llama-3-70b", 131_072, 4)
    found = document(base)
    assert found["kv"]["total_bytes"] == 160 * GIB
    assert found["fits"] is False and found["would_fit"][0]["changes"] == {"tp": 8}
    assert found["kv"]["token_bytes_by_layer"] == [4096] * 80
    assert any("171.80 GB = 160.00 GiB" in text for _, text in lines(base))
    assert any("DOES NOT FIT" in heading for heading, _ in lines(base))
