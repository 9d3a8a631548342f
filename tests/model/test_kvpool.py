"""What lies in the pool's pages: the reference's slots, and the native kernel's tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision, Vector
from tests.model.attended import CPU, Attended, Still, stored
from workers.attention.formats import PLAIN, decode, encode
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.models.spec import Unsupported
from workers.native.library import load_library
from workers.native.pairs import PAIRS
from workers.rotation import Rotation, rotate

pytestmark = pytest.mark.model


@pytest.mark.parametrize("precision", list(Precision))
def test_a_pool_takes_the_layout_s_bytes_and_starts_as_zeros(precision: Precision) -> None:
    layout = KVLayout(16, (LayerKV.pair(3, 64, precision),) * 2)
    pool = KVPool(layout, 700, CPU)
    assert [tuple(page.shape) for page in pool.pages] == [(700, layout.page_bytes(0))] * 2
    assert not any(page.any() for page in pool.pages)
    assert pool.slots(0).shape == (700, 3 * 16, precision.vector_bytes(64) + precision.of_values.vector_bytes(64))
    assert pool.pages[0].data_ptr() % 64 == 0
    pool.slots(1)[699, pool.rows(torch.tensor(15))[2]] = 1
    assert pool.pages[1][699].any() and not pool.pages[1][:699].any() and not pool.pages[0].any()


def test_pools_without_kernels_are_refused() -> None:
    for shape in (
        LayerKV.pair(1, 18, Precision.INT8),
        LayerKV.pair(1, 20, Precision.INT4),
        LayerKV.latent(66, 16, Precision.INT8),
        LayerKV(1, (Vector(64, Precision.BF16), Vector(32, Precision.BF16))),
    ):
        with pytest.raises(Unsupported):
            KVPool(KVLayout(16, (shape,)), 1, CPU)


def test_open_keys_lie_in_the_columns_of_their_layers_and_move_with_their_block() -> None:
    kinds = (Precision.INT8, Precision.INT4_CHANNEL, Precision.INT4_CHANNEL)
    pool = KVPool(KVLayout(32, tuple(LayerKV.pair(2, 64, kind) for kind in kinds)), 6, CPU)
    assert pool.open_groups == ((), (1, 2), (1, 2)) and pool.windows == (None, 1, 1)
    assert pool.scales(1).shape == (6, 2, 2, 64) and pool.open_keys(2).shape == (6, 2, 16, 64)
    pool.open_keys(2)[4] = 1.5
    assert [[bool(block.any()) for block in column] for column in pool.columns] == [
        [False] * 6,
        [False] * 6,
        [block == 4 for block in range(6)],
    ]
    pool.copy([(4, 1)])
    assert (pool.open_keys(2)[1] == 1.5).all()
    pool.zero([1, 4])
    assert not pool.columns[2].any()
    assert sum(column.numel() for column in pool.columns) == 6 * pool.layout.block_bytes


def test_a_block_is_one_layer_group_s_at_a_time() -> None:
    """Layers of two windows share columns; where their pages differ in size, the smaller lie apart."""
    narrow, wide = (LayerKV.pair(2, 64, one, window=w) for one, w in ((Precision.INT8, None), (Precision.BF16, 40)))
    pool = KVPool(KVLayout(16, (narrow, wide)), 6, CPU)
    assert len(pool.columns) == 1 and pool.columns[0].numel() == 6 * pool.layout.block_bytes
    assert pool.group_of == (0, 1) and pool.windows == (None, 40)
    slots = {
        layer: pool.rows(torch.tensor([16 * block + 3 for block in blocks]))
        for layer, blocks in ((0, [1, 4]), (1, [2, 5]))
    }
    for layer, rows in slots.items():
        size = pool.layout.layers[layer].slot_bytes
        fresh = torch.randint(1, 255, (4, size), dtype=torch.uint8)
        pool.scatter(layer, rows.view(-1), fresh)
        assert torch.equal(pool.gather(layer, rows.view(-1), torch.empty_like(fresh)), fresh)
    assert [bool(block.any()) for block in pool.columns[0]] == [False, True, True, False, True, True]
    pool.copy([(2, 3)])
    assert torch.equal(pool.pages[1][3], pool.pages[1][2])
    pool.zero([2, 3, 5])
    assert [bool(block.any()) for block in pool.columns[0]] == [False, True, False, False, True, False]


def test_the_reference_reads_int8_like_fp32_and_no_unused_slot() -> None:
    shape, lengths = (2, 3, 64), (70, 20, 33)
    wide = Attended(None, *shape, precision=Precision.FP32, lengths=lengths)
    narrow = Attended(None, *shape, precision=Precision.INT8, lengths=lengths)
    narrow.pool.pages[0].fill_(255)  # NaN as a scale
    for step in ([(0, 30), (1, 1), (2, 5)], [(0, 1), (2, 1), (1, 1)], [(0, 39), (1, 18), (2, 27)]):
        for got, expected in zip(narrow.run(step), wide.run(step), strict=True):
            assert (got - expected).abs().max() < 0.03


def heads_of(device: Attended, dim: int, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first sequence as they come, fp32 [tokens, heads, dim] of either."""
    both = device.heads[0].float().unflatten(-1, (-1, dim))[:, -2 * heads :]
    return both[:, :heads].contiguous(), both[:, heads:].contiguous()


KEPT = dict.fromkeys(vector for pair in PAIRS for vector in pair if not vector.by_channel)
"""Every format that the native kernels store token by token."""


@pytest.mark.parametrize("precision", KEPT, ids=lambda kind: kind.label)
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_native_kernel_stores_turned_keys_and_values_in_its_tiles(precision: Precision, block_size: int) -> None:
    heads, ratio, dim, length = 3, 2, 48, 100
    device = Attended(load_library(), heads, ratio, dim, block_size=block_size, precision=precision, lengths=(length,))
    device.walk(0, [37, 1, 62])
    expected, values = heads_of(device, dim, heads)
    rotate(expected, Rotation(Rope(theta=100.0), dim, CPU).at(torch.arange(length)))
    got, as_given = stored(device)
    assert torch.equal(as_given, encode(values, precision))
    # A turned key may be off by its last bit; where that is a tie, an element lies one step beside.
    numbers = [
        decode(part.flatten(0, 1), precision, torch.empty(length * heads, dim))
        for part in (got, encode(expected, precision))
    ]
    step = {4: 1 / 15, 8: 1 / 8, 16: 2**-7}[precision.bits] * expected.abs().amax(-1).view(-1, 1) * 2
    away = (numbers[0] - numbers[1]).abs()
    assert (away <= step).all() and (away > 1e-5).float().mean() < 2e-3


@pytest.mark.parametrize("precision", KEPT, ids=lambda kind: kind.label)
def test_odd_vectors_are_stored_as_formats_has_them(precision: Precision) -> None:
    """Zeros, one value throughout, an outlier, small magnitudes; what is not finite spoils its own vector."""
    dim, rows = 32, torch.randn(12, 32)
    rows[0] = 0.0
    rows[1] = 3.25
    rows[2, 5] = 3e4
    rows[3] *= 1e-30
    rows[4] = torch.linspace(-2, 448, dim)
    rows[5] = torch.tensor([448.0, 0.001, -0.009, 0.02] * 8)
    rows[6] = torch.tensor([57_344.0, 1e-5, -2e-5, 3e-5] * 8)
    rows[7] = -7.0
    rows[8, 3], rows[9, 3], rows[10, 3] = float("nan"), float("inf"), -float("inf")
    device = Attended(load_library(), 1, 1, dim, precision=precision, lengths=(12,))
    device.heads[0][:, dim : 2 * dim] = device.heads[0][:, 2 * dim :] = rows.bfloat16()
    device.turns = Still(dim)
    device.walk(0, [12])
    given = rows.bfloat16().float()
    finite = given.isfinite().all(-1)
    for part in stored(device):
        part, expected = part[:, 0], encode(given, precision)
        assert torch.equal(part[finite], expected[finite])
        if precision not in PLAIN:
            assert decode(part, precision, torch.empty_like(rows))[~finite].isnan().all()


@pytest.mark.parametrize("precision", [Precision.INT4, Precision.FP8_E5M2], ids=lambda kind: kind.label)
def test_threads_that_share_a_row_store_all_of_it(precision: Precision) -> None:
    library = load_library()
    before, pages = library.threads, []
    try:
        for threads in (1, 2, 3, 5):
            library.threads = threads
            device = Attended(library, 1, 1, 16, precision=precision, lengths=(203, 90))
            device.run([(0, 3), (1, 1)])
            device.run([(0, 200), (1, 89)])
            pages.append(device.pool.pages[0].clone())
    finally:
        library.threads = before
    assert all(torch.equal(page, pages[0]) for page in pages)


def test_fp16_keeps_subnormal_numbers_infinities_and_nan() -> None:
    device = Attended(load_library(), 1, 1, 16, precision=Precision.FP16, lengths=(1,))
    odd = torch.tensor([0.0, -0.0, 6e-8, 2.9e-8, 3.1e-8, -6.1e-5, 6.09e-5, 1.0009765625])
    odd = torch.cat((odd, torch.tensor([65504.0, 65472.0, 65535.0, 7e4, -1e30, float("inf"), float("nan"), 1e-20])))
    device.heads[0][0, 32:] = odd
    device.run([(0, 1)])
    values = decode(stored(device)[1][0], Precision.FP16, torch.empty(1, 16))[0]
    assert torch.equal(values.nan_to_num(-3), odd.bfloat16().half().float().nan_to_num(-3))
