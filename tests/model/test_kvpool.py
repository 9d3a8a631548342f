"""What lies in the pool's pages: the reference's slots, and the native kernel's tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore.layout import KVLayout, LayerKV, Precision, Vector
from tests.model.attended import CPU, Attended
from workers.kvpool import KVPool
from workers.models.rope import Rope
from workers.models.spec import Unsupported
from workers.native.library import load_library
from workers.rotation import Rotation, rotate

pytestmark = pytest.mark.model


_STORED = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.INT8: torch.int8}


@pytest.mark.parametrize("precision", list(Precision))
def test_a_pool_takes_the_layout_s_bytes_and_starts_as_zeros(precision: Precision) -> None:
    layout = KVLayout(16, (LayerKV.pair(3, 64, precision),) * 2)
    pool = KVPool(layout, 700, CPU)
    assert [tuple(page.shape) for page in pool.pages] == [(700, layout.page_bytes(0))] * 2
    assert not any(page.any() for page in pool.pages)
    assert pool.slots(0).shape == (700, 3 * 16, 2 * precision.vector_bytes(64))
    assert pool.pages[0].data_ptr() % 64 == 0
    pool.slots(1).flatten(0, 1)[pool.rows(torch.tensor(699 * 16 + 15))[2]] = 1
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


def tiles(device: Attended, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first sequence as the native kernel has stored them, fp32 [tokens, heads, dim]."""
    pool, tokens = device.pool, len(device.heads[0])
    raw = pool.pages[0][list(device.tables[0])].unflatten(-1, (heads, pool.block_size // 16, -1))
    stored = _STORED[pool.layout.layers[0].vectors[0].precision]
    size = 32 * dim * stored.itemsize
    content, scales = raw[..., :size], raw[..., size:]
    keys, values = content.contiguous().view(stored).float().unflatten(-1, (2, -1)).unbind(-2)
    keys = keys.unflatten(-1, (dim // 2, 16, 2)).transpose(-3, -2).flatten(-2)
    values = values.unflatten(-1, (8, dim, 2)).transpose(-2, -1).flatten(-3, -2)
    if scales.numel():
        both = scales.contiguous().view(torch.float32).unflatten(-1, (2, 16, 1))
        keys, values = keys * both[..., 0, :, :], values * both[..., 1, :, :]
    return tuple(part.transpose(0, 1).flatten(1, 3)[:, :tokens].transpose(0, 1) for part in (keys, values))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.INT8], ids=lambda kind: kind.label)
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_native_kernel_stores_turned_keys_and_values_in_its_tiles(precision: Precision, block_size: int) -> None:
    heads, ratio, dim, length = 3, 2, 48, 100
    device = Attended(load_library(), heads, ratio, dim, block_size=block_size, precision=precision, lengths=(length,))
    device.walk(0, [37, 1, 62])
    both = device.heads[0].float().unflatten(-1, (-1, dim))[:, ratio * heads :]
    expected, values = both[:, :heads].contiguous(), both[:, heads:]
    rotate(expected, Rotation(Rope(theta=100.0), dim, CPU).at(torch.arange(length)))
    slack = {Precision.BF16: 2**-8, Precision.FP16: 2**-11, Precision.INT8: 0.5 / 127}[precision]
    for got, wanted in zip(tiles(device, heads, dim), (expected, values), strict=True):
        assert got.shape == wanted.shape
        most = wanted.abs() if precision is not Precision.INT8 else wanted.abs().amax(-1, keepdim=True)
        assert ((got - wanted).abs() <= 1.01 * slack * most + 1e-6).all()


def test_fp16_keeps_subnormal_numbers_infinities_and_nan() -> None:
    device = Attended(load_library(), 1, 1, 16, precision=Precision.FP16, lengths=(1,))
    odd = torch.tensor([0.0, -0.0, 6e-8, 2.9e-8, 3.1e-8, -6.1e-5, 6.09e-5, 1.0009765625])
    odd = torch.cat((odd, torch.tensor([65504.0, 65472.0, 65535.0, 7e4, -1e30, float("inf"), float("nan"), 1e-20])))
    device.heads[0][0, 32:] = odd
    device.run([(0, 1)])
    values = tiles(device, 1, 16)[1][0, 0]
    assert torch.equal(values.nan_to_num(-3), odd.bfloat16().half().float().nan_to_num(-3))
