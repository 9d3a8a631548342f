"""KV arithmetic against the published numbers of known models, and how heads spread over ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import KVLayout, LayerKV, Precision, Vector, live_blocks
from kvstore.shards import shard_heads, split_evenly

GIB = 2**30
BF16 = Precision.BF16


def layout(layers: int, heads: int, head_dim: int, vectors: int = 2, precision: Precision = BF16) -> KVLayout:
    return KVLayout(16, (LayerKV(heads, (Vector(head_dim, precision),) * vectors),) * layers)


@pytest.mark.parametrize(
    ("model", "per_layer", "per_token", "tokens", "total"),
    [
        (layout(80, 64, 128), 32_768, 2_621_440, 8192, 20 * GIB),
        (layout(80, 64, 128), 32_768, 2_621_440, 131_072, 320 * GIB),
        (layout(80, 8, 128), 4_096, 327_680, 131_072, 40 * GIB),
        (layout(80, 1, 128), 512, 40_960, 131_072, 5 * GIB),
        (layout(32, 8, 128), 4_096, 131_072, 8192, 1 * GIB),
        (layout(60, 1, 576, vectors=1), 1_152, 69_120, 131_072, 9_059_696_640),
        (layout(61, 1, 576, vectors=1), 1_152, 70_272, 8192, 575_668_224),
        (layout(30, 3, 64), 768, 23_040, 8192, 188_743_680),
    ],
)
def test_bytes_of_known_models(model: KVLayout, per_layer: int, per_token: int, tokens: int, total: int) -> None:
    assert model.layers[0].token_bytes == per_layer
    assert model.token_bytes == per_token
    assert model.bytes_for(tokens) == total


def test_windowed_layers_keep_their_window_and_form_a_group() -> None:
    full, windowed = LayerKV.pair(8, 256, BF16), LayerKV.pair(8, 256, BF16, window=4096)
    gemma = KVLayout(16, (windowed, full) * 21)
    assert gemma.token_bytes == 344_064
    assert gemma.bytes_for(8192) == 21 * 8192 * (4096 + 8192)
    assert [group.layers[:2] for group in gemma.groups] == [(1, 3), (0, 2)]
    assert [group.window for group in gemma.groups] == [None, 4096]
    assert gemma.columns == (16 * 2 * 8 * 256 * 2,) * 21 and gemma.places[:3] == ((1, 0), (0, 0), (1, 1))
    assert gemma.block_bytes * 2 == 16 * gemma.token_bytes


def test_the_larger_class_of_layers_is_cut_into_groups_of_the_bytes_of_the_smaller() -> None:
    full, windowed = LayerKV.pair(1, 256, BF16), LayerKV.pair(1, 256, BF16, window=512)
    gemma = KVLayout(16, ((windowed,) * 5 + (full,)) * 3)
    assert [len(group.layers) for group in gemma.groups] == [3] * 6 and len(gemma.columns) == 3
    uneven = KVLayout(16, ((windowed,) * 5 + (full,)) * 4 + (windowed,) * 2)
    assert [len(group.layers) for group in uneven.groups] == [4, 4, 4, 4, 4, 3, 3]
    assert uneven.block_bytes == 4 * uneven.page_bytes(0)


def test_layers_of_one_window_share_a_table_whatever_their_precision() -> None:
    mixed = KVLayout(16, (LayerKV.pair(2, 64, BF16), LayerKV.pair(2, 64, Precision.INT8)) * 3)
    assert [group.layers for group in mixed.groups] == [tuple(range(6))]
    assert mixed.columns == tuple(mixed.page_bytes(layer) for layer in range(6))


@given(
    st.lists(st.tuples(st.sampled_from([None, 1, 40, 64]), st.sampled_from(list(Precision))), min_size=1, max_size=40)
)
def test_every_layer_has_a_page_of_its_own_in_each_block_of_its_group(
    kinds: list[tuple[int | None, Precision]],
) -> None:
    found = KVLayout(16, tuple(LayerKV.pair(2, 64, precision, window=window) for window, precision in kinds))
    assert len({found.places[layer] for layer in range(len(kinds))}) == len(kinds)
    for layer, (group, column) in enumerate(found.places):
        assert found.groups[group].window == kinds[layer][0]
        assert found.columns[column] >= found.page_bytes(layer) >= found.open_bytes(layer)
        halves = [found.groups[number] for number in found.open_groups[layer]]
        assert [half.half for half in halves] == ([0, 1] if kinds[layer][1].by_channel else [])
        assert all(half.window == 1 and half.layers == found.groups[group].layers for half in halves)
    if len({window for window, _ in kinds}) == 1:
        assert found.block_bytes == 16 * found.token_bytes


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 16), st.integers(0, 200))
def test_live_blocks_is_the_most_that_a_window_touches(window: int, ahead: int, size: int, computed: int) -> None:
    def touched(start: int) -> int:
        return (start + ahead - 1) // size - max(0, start - window + 1) // size + 1

    assert touched(computed) <= live_blocks(window, ahead, size)
    assert max(map(touched, range(200, 200 + size))) == live_blocks(window, ahead, size)


def test_quantised_layers_carry_their_scales() -> None:
    assert layout(1, 1, 128, precision=Precision.INT8).token_bytes == 2 * (128 + 4)
    capacity = layout(30, 3, 64).block_bytes / layout(30, 3, 64, precision=Precision.INT8).block_bytes
    assert capacity == pytest.approx(1.882, abs=1e-3)
    capacity = layout(30, 3, 64).block_bytes / layout(30, 3, 64, precision=Precision.INT4).block_bytes
    assert capacity == pytest.approx(3.556, abs=1e-3)


def test_keys_by_channel_share_the_scales_of_a_block_and_have_two_groups_for_what_is_open() -> None:
    """Of SmolLM2, 3.56 times as many tokens as bf16 in blocks of 64; each running sequence takes two blocks more."""
    plain, kept = LayerKV.pair(3, 64, BF16), LayerKV.pair(3, 64, Precision.INT4_CHANNEL)
    assert [vector.precision for vector in kept.vectors] == [Precision.INT4_CHANNEL, Precision.INT4]
    assert (kept.token_bytes, kept.channel_bytes) == (3 * (32 + 36), 3 * 64 * 4)
    capacity = {}
    for size in (32, 64):
        found = KVLayout(size, (kept,) * 30)
        assert found.page_bytes(0) == size * 204 + 768 and found.block_bytes == 30 * found.page_bytes(0)
        assert found.open_bytes(0) == size // 2 * 3 * 64 * 2 <= found.page_bytes(0)
        assert [(group.window, group.half) for group in found.groups] == [(None, None), (1, 0), (1, 1)]
        capacity[size] = KVLayout(size, (plain,) * 30).block_bytes / found.block_bytes
        assert found.bytes_for(size + 1) == 30 * (204 * (size + 1) + 2 * 768)
    assert capacity == pytest.approx({32: 3.368, 64: 3.556}, abs=1e-3)
    assert (
        KVLayout(64, (kept,) * 30).token_bytes
        == 6480
        == KVLayout(64, (LayerKV.pair(3, 64, Precision.INT4),) * 30).token_bytes
    )


def test_each_window_has_open_groups_of_its_own_where_a_layer_keeps_keys_by_channel() -> None:
    kinds = [(BF16, None), (Precision.INT4_CHANNEL, None), (Precision.INT4_CHANNEL, 40), (BF16, 70)]
    found = KVLayout(32, tuple(LayerKV.pair(2, 64, precision, window=window) for precision, window in kinds))
    assert [(group.window, group.half) for group in found.groups][-4:] == [(1, 0), (1, 1)] * 2
    sealed = len(found.groups) - 4
    places = {layer: found.open_groups[layer] for layer in range(4)}
    assert places == {0: (), 1: (sealed, sealed + 1), 2: (sealed + 2, sealed + 3), 3: ()}


def test_what_cannot_be_kept_by_channel_is_refused() -> None:
    channel = Precision.INT4_CHANNEL
    for wrong in (
        lambda: LayerKV.latent(512, 64, channel),
        lambda: LayerKV(1, (Vector(64, BF16), Vector(64, channel))),
        lambda: KVLayout(15, (LayerKV.pair(1, 64, channel),)),
    ):
        with pytest.raises(ValueError, match=r"by channel|even block_size"):
            wrong()


def test_layers_may_differ_and_the_sum_is_exact() -> None:
    mixed = KVLayout(
        16, (LayerKV.pair(3, 64, BF16), LayerKV.pair(3, 64, Precision.INT8, Precision.INT4), LayerKV.pair(3, 64, BF16))
    )
    assert [layer.token_bytes for layer in mixed.layers] == [768, 3 * (68 + 36), 768]
    assert mixed.block_bytes == 16 * (768 + 312 + 768) == sum(mixed.page_bytes(index) for index in range(3))
    assert mixed.precisions == {BF16, Precision.INT8, Precision.INT4}


def test_mla_keeps_one_latent_and_may_keep_its_rotated_part_as_it_is() -> None:
    assert LayerKV.latent(512, 64, BF16).token_bytes == 1152
    assert LayerKV.latent(512, 64, Precision.INT8, BF16).token_bytes == 512 + 4 + 128
    assert LayerKV.latent(512, 64, Precision.INT8) == LayerKV.latent(512, 64, Precision.INT8, BF16)
    assert LayerKV.latent(512, 64, Precision.FP32).token_bytes == 4 * 576
    assert LayerKV.latent(16, 16, BF16) != LayerKV.pair(1, 16, BF16)


def test_an_unknown_precision_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"fp7.*bf16"):
        Precision.parse("fp7")


def test_budget_buys_whole_blocks() -> None:
    smol = layout(30, 3, 64)
    assert smol.block_bytes == 16 * 23_040
    assert smol.blocks_in(72 * 2**20) == 72 * 2**20 // (16 * 23_040)
    assert smol.blocks_for(17) == 2


@given(st.integers(1, 200), st.integers(1, 20))
def test_split_evenly_covers_everything_once(total: int, parts: int) -> None:
    shares = split_evenly(total, parts)
    assert [a for a, _ in shares] == [0, *(b for _, b in shares[:-1])]
    assert shares[-1][1] == total
    sizes = [b - a for a, b in shares]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 16), st.integers(1, 8), st.data())
def test_every_query_head_lies_beside_its_kv_head(kv_heads: int, ratio: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, kv_heads * ratio))
    shards = shard_heads(kv_heads * ratio, kv_heads, ranks)
    assert len(shards) == ranks
    assert [shard.q_start for shard in shards] == [0, *(shard.q_stop for shard in shards[:-1])]
    assert shards[-1].q_stop == kv_heads * ratio
    for shard in shards:
        assert shard.q_heads >= 1
        assert shard.kv_start == shard.q_start // ratio
        assert shard.kv_stop == (shard.q_stop - 1) // ratio + 1
        assert shard.kv_heads <= -(-kv_heads // ranks)


def test_smollm2_heads_on_two_ranks() -> None:
    fullest, other = shard_heads(9, 3, 2)
    assert (fullest.kv_heads, other.kv_heads) == (2, 1)
    assert (fullest.q_heads, other.q_heads) == (6, 3)


def test_too_many_ranks_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"10 is more than the 9 query heads"):
        shard_heads(9, 3, 10)
