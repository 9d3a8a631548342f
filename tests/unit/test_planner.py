"""The planner's arithmetic: known values, the layout that ranks use, sums over ranks, limits that are the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deploy.plan.modeltable import CONFIGS, MODELS, find
from deploy.plan.planner import (
    KV_PRECISIONS,
    Ask,
    Hardware,
    Plan,
    PlanError,
    greatest,
    layer_kv,
    layouts,
)
from deploy.plan.report import formula, kv_formula
from deploy.plan.shapes import Attention, FeedForward, Latent, Layer, ModelShape
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from workers.models.reading import parse_native

GIB = 2**30
EIGHT = Hardware("gpu", 8, 80 * GIB, 0.9)
SIMPLE = st.builds(
    lambda kv, ratio, dim, window, layers, experts: ModelShape(
        "drawn",
        tuple(
            Layer(
                Attention(kv * ratio, kv, dim, window=window if index % 2 else None),
                FeedForward(96, experts=experts, chosen=min(2, experts)),
                128,
            )
            for index in range(layers)
        ),
        hidden=64,
        vocab=1000,
        tied=False,
        extra=64,
        context=4096,
        dtype="bf16",
    ),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([8, 32, 64]),
    st.sampled_from([None, 1, 33, 512]),
    st.integers(1, 5),
    st.sampled_from([0, 4]),
)


def shape(name: str) -> ModelShape:
    found = find(name)
    assert found is not None
    return found


def kv(name: str, tokens: int, batch: int = 1, precision: str = "bf16") -> int:
    return Plan(shape(name), EIGHT, Ask(tokens, batch, kv_precision=precision)).kv_bytes


@pytest.mark.parametrize(
    ("name", "layer", "token"),
    [
        ("llama-2-70b-mha", 32_768, 2_621_440),
        ("llama-3-70b", 4096, 327_680),
        ("qwen2-72b", 4096, 327_680),
        ("llama-3-70b-mqa", 512, 40_960),
        ("llama-3-8b", 4096, 131_072),
        ("mistral-7b", 4096, 131_072),
        ("gemma-2-9b", 8192, 344_064),
        ("deepseek-v2", 1152, 69_120),
        ("deepseek-v3", 1152, 70_272),
        ("deepseek-v2-mha", 81_920, 60 * 81_920),
        ("smollm2-135m", 768, 23_040),
    ],
)
def test_bytes_per_token(name: str, layer: int, token: int) -> None:
    layout = layouts(shape(name), 32, "bf16", 1)[0]
    assert {each.token_bytes for each in layout.layers} == {layer}
    assert layout.token_bytes == token


@pytest.mark.parametrize(
    ("name", "tokens", "batch", "expected"),
    [
        ("llama-2-70b-mha", 8192, 1, 20 * GIB),
        ("llama-2-70b-mha", 4096, 1, 10 * GIB),
        ("llama-2-70b-mha", 131_072, 1, 320 * GIB),
        ("llama-2-70b-mha", 4096, 32, 320 * GIB),
        ("llama-3-70b", 8192, 1, 5 * GIB // 2),
        ("llama-3-70b", 131_072, 1, 40 * GIB),
        ("llama-3-70b", 131_072, 4, 160 * GIB),
        ("qwen2-72b", 131_072, 4, 160 * GIB),
        ("llama-3-70b-mqa", 8192, 1, 5 * GIB // 16),
        ("llama-3-70b-mqa", 131_072, 1, 5 * GIB),
        ("llama-3-8b", 8192, 1, GIB),
        ("llama-3-8b", 131_072, 1, 16 * GIB),
        ("mistral-7b", 8192, 1, GIB),
        ("mistral-7b", 131_072, 1, 16 * GIB),
    ],
)
def test_bytes_of_whole_sequences(name: str, tokens: int, batch: int, expected: int) -> None:
    assert kv(name, tokens, batch) == expected


@pytest.mark.parametrize(
    ("name", "tokens", "batch", "gigabytes", "digits"),
    [
        ("llama-2-70b-mha", 8192, 1, 21.475, 3),
        ("llama-2-70b-mha", 4096, 32, 343.6, 1),
        ("llama-2-70b", 4096, 1, 1.34, 2),
        ("llama-2-70b", 4096, 32, 42.9, 1),
        ("llama-3-70b", 131_072, 1, 42.95, 2),
        ("gemma-2-9b", 8192, 1, 2.114, 3),
        ("deepseek-v2", 8192, 1, 0.566, 3),
        ("deepseek-v2", 131_072, 1, 9.06, 2),
        ("deepseek-v3", 8192, 1, 0.576, 3),
        ("deepseek-v3", 131_072, 1, 9.21, 2),
        ("smollm2-135m", 8192, 1, 0.189, 3),
    ],
)
def test_gigabytes_of_whole_sequences(name: str, tokens: int, batch: int, gigabytes: float, digits: int) -> None:
    assert round(kv(name, tokens, batch) / 1e9, digits) == gigabytes


def test_gemma_without_its_windows_and_smollm_in_gibibytes() -> None:
    assert round(layouts(shape("gemma-2-9b"), 32, "bf16", 1)[0].token_bytes * 8192 / 1e9, 3) == 2.819
    assert round(kv("smollm2-135m", 8192) / GIB, 3) == 0.176


def test_what_the_latent_saves() -> None:
    whole = layer_kv(shape("deepseek-v2-mha").layers[0].attention, 128, "bf16").token_bytes
    narrow = layer_kv(Attention(128, 128, 128), 128, "bf16").token_bytes
    latent = layer_kv(shape("deepseek-v2").layers[0].attention, 1, "bf16").token_bytes
    assert (whole, narrow, latent) == (81_920, 65_536, 1152)
    assert round(100 * (1 - latent / whole), 1) == 98.6
    assert round(100 * (1 - latent / narrow), 1) == 98.2


def test_llama_3_70b_as_a_whole() -> None:
    ask = Ask(131_072, 4)
    plan = Plan(shape("llama-3-70b"), EIGHT, ask)
    eight_bits = Plan(plan.shape, EIGHT, replace(ask, kv_precision="fp8_e4m3"))
    assert round(plan.weight_bytes / 1e9) == 141
    assert round((plan.weight_bytes + plan.kv_bytes) / 1e9) == 313
    # Without scales it would be 227 GB; they are 4 B on 128.
    assert round((plan.weight_bytes + plan.kv_bytes / 2) / 1e9) == 227
    assert eight_bits.kv_bytes * 256 == plan.kv_bytes * 132
    heads = {name: shape(f"llama-3-70b{name}").layers[0].attention for name in ("-mha", "", "-mqa")}
    assert [2 * each.kv_heads * each.head_dim for each in heads.values()] == [16_384, 2048, 256]


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2-7b", 7_615_616_512),
        ("qwen2-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("phi-3-mini", 3_821_079_552),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_weights_counted_from_shapes(name: str, elements: int) -> None:
    assert shape(name).elements.total == elements


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("precision", list(Precision))
def test_the_served_models_pages_are_those_of_its_ranks(ranks: int, precision: Precision) -> None:
    spec = parse_native({"architectures": ["LlamaForCausalLM"], **CONFIGS["smollm2-135m"]})
    assert layouts(shape("smollm2-135m"), 32, precision.label, ranks) == spec.layout(
        32, PrecisionMap.uniform(precision), ranks
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_pool_of_the_served_model_to_the_byte(ranks: int) -> None:
    budget = 72 * 2**20 + 12_345
    ask = Ask(256, 1, ranks=ranks, kv_memory=budget)
    plan = Plan(shape("smollm2-135m"), Hardware("cpu", 1, 24 * GIB, 0.25), ask)
    spec = parse_native({"architectures": ["LlamaForCausalLM"], **CONFIGS["smollm2-135m"]})
    live = spec.layout(32, PrecisionMap.uniform(Precision.BF16), ranks)
    blocks = min(layout.blocks_in(budget) for layout in live)
    assert plan.pool_blocks == blocks
    assert plan.pool_bytes == tuple(blocks * layout.block_bytes for layout in live)


def test_three_kv_heads_on_two_ranks_leave_a_third_idle() -> None:
    plan = Plan(shape("smollm2-135m"), EIGHT, Ask(8192, 1, ranks=2))
    first, second = plan.held_bytes
    assert (first + second, first) == (plan.kv_bytes, 2 * second)
    assert plan.idle_bytes == second
    assert plan.copied_bytes == 0


def test_more_ranks_than_kv_heads_copy() -> None:
    plan = Plan(shape("llama-3-70b"), EIGHT, Ask(8192, 1, ranks=16))
    assert plan.copied_bytes == plan.kv_bytes
    assert plan.idle_bytes == 0


def test_the_latent_is_whole_on_every_rank() -> None:
    plan = Plan(shape("deepseek-v3"), EIGHT, Ask(8192, 2, ranks=8))
    assert set(plan.held_bytes) == {plan.kv_bytes}
    assert plan.copied_bytes == 7 * plan.kv_bytes


def test_quantised_layers_carry_their_scales_and_a_latent_s_rotated_part_stays() -> None:
    assert layer_kv(Attention(8, 8, 128), 8, "int4").token_bytes == 2 * 8 * (64 + 4)
    assert layer_kv(Attention(8, 8, 192, value_dim=128), 8, "int8").token_bytes == 8 * (192 + 4 + 128 + 4)
    latent = Attention(128, 128, 192, value_dim=128, latent=Latent(512, 64))
    assert [layer_kv(latent, 1, label).token_bytes for label in ("bf16", "int8", "fp32")] == [1152, 644, 2304]


def test_keys_by_channel_have_scales_per_block_and_two_open_blocks_per_sequence() -> None:
    """Of 8,192 tokens: 128 blocks of 64, and two more while the sequence runs; a latent has no channels to scale."""
    plan = Plan(shape("smollm2-135m"), EIGHT, Ask(8192, 4, kv_precision="int4_channel", block_size=64))
    page = 3 * (64 * (32 + 36) + 64 * 4)
    assert plan.kv_bytes == 4 * 128 * 30 * page and plan.held_bytes == (4 * (128 + 2) * 30 * page,)
    assert plan.whole.token_bytes == 6480 and "128 blocks × 768 B" in kv_formula(plan)
    total = kv_formula(plan).split(" = ")[-1]
    assert total == f"{plan.kv_bytes:,} B"
    bf16 = Plan(shape("smollm2-135m"), EIGHT, Ask(8192, 4, block_size=64))
    assert 3.49 < bf16.held_bytes[0] / plan.held_bytes[0] < 3.51
    with pytest.raises(PlanError, match="MLA's latents cannot be kept in int4_channel; ask for int4"):
        Plan(shape("deepseek-v3"), EIGHT, Ask(8192, 2, ranks=8, kv_precision="int4_channel"))
    assert formula(plan.shape.layers[0].attention, "int4_channel") == (
        "3 KV heads × (64 × 0.5 B + (64 × 0.5 B + 4 B of scales)) = 204 B, and 768 B of scales per block"
    )


@pytest.mark.parametrize(
    ("ask", "word"),
    [
        (Ask(8192, 1, ranks=10), "9 query heads"),
        (Ask(8192, 1, kv_precision="int3"), "int4"),
        (Ask(8192, 1, weights="q4"), "bf16"),
        (Ask(0, 1), "at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(ask: Ask, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        Plan(shape("smollm2-135m"), EIGHT, ask)


@given(SIMPLE, st.integers(1, 24), st.sampled_from(KV_PRECISIONS), st.integers(1, 2000), st.integers(1, 9))
def test_ranks_add_up(model: ModelShape, ranks: int, precision: str, context: int, batch: int) -> None:
    assume(ranks <= model.q_heads)
    plan = Plan(model, EIGHT, Ask(context, batch, ranks=ranks, kv_precision=precision))
    held = plan.held_bytes
    whole = Plan(model, EIGHT, Ask(context, batch, kv_precision=precision))
    assert sum(held) == whole.held_bytes[0] + plan.copied_bytes
    assert sum(held) + plan.idle_bytes == ranks * max(held)
    assert whole.held_bytes[0] >= whole.kv_bytes
    assert sum(rank.weights for rank in plan.ranks) >= plan.weight_bytes
    if ranks <= model.layers[0].attention.kv_heads:
        assert plan.copied_bytes == 0
        norms = sum(layer.norms + 64 * layer.mlp.experts for layer in model.layers) + model.extra
        assert sum(rank.weights for rank in plan.ranks) == plan.weight_bytes + (ranks - 1) * 2 * norms


@given(SIMPLE, st.integers(1, 3), st.integers(1, 3000), st.integers(1, 40))
def test_more_never_takes_less(model: ModelShape, ranks: int, context: int, batch: int) -> None:
    assume(ranks <= model.q_heads)
    plan = Plan(model, EIGHT, Ask(context, batch, ranks=ranks))
    for rank in plan.ranks:
        here = rank.total(batch, context, 512)
        assert here <= rank.total(batch + 1, context, 512)
        assert here <= rank.total(batch, context + 1, 512)


@given(SIMPLE, st.integers(1, 3), st.integers(1, 3000), st.integers(1, 20), st.integers(760, 900))
@settings(max_examples=60)
def test_the_limits_are_the_limits(model: ModelShape, ranks: int, context: int, batch: int, mebibytes: int) -> None:
    assume(ranks <= model.q_heads)
    plan = Plan(model, Hardware("gpu", ranks, mebibytes * 2**20, 1.0), Ask(context, batch, ranks=ranks))
    most, longest = plan.max_batch, plan.max_context
    assert not plan.fits_with(most + 1, context)
    assert most == 0 or plan.fits_with(most, context)
    assert plan.fits == (batch <= most)
    if longest is None:
        assert plan.fits and all(layer.attention.window for layer in model.layers)
    else:
        assert not plan.fits_with(batch, longest + 1)
        assert longest == 0 or plan.fits_with(batch, longest)
        assert plan.fits == (context <= longest)


@given(st.integers(0, 10_000))
def test_greatest(limit: int) -> None:
    assert greatest(lambda number: number <= limit) == limit


def test_every_model_of_the_table_can_be_planned() -> None:
    for name in MODELS:
        plan = Plan(shape(name), EIGHT, Ask(4096, 1))
        assert plan.weight_bytes > 0 and plan.kv_bytes > 0
