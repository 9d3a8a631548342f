"""The native linears and norms, in every build that this CPU can execute: values, row invariance, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, silu

from kvstore.layout import Precision
from tests.model.tiny import FAMILIES, Ranks, oracle, prompt, save_model, tables
from workers.kernels import Activation
from workers.native.arena import Arena
from workers.native.kernels import NativeKernels
from workers.native.library import Library, load_library
from workers.native.packing import tile_width
from workers.native.processor import Processor
from workers.native.workspace import Workspace

pytestmark = pytest.mark.model

VARIANTS = [variant.name for variant in Processor.read().variants]
SIZES = [(48, 576), (101, 97), (130, 33), (3, 1), (16, 2), (320, 192)]
"""(out, in): whole tiles, odd, a remainder of everything, smaller than anything."""
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: functools.partial(gelu, approximate="tanh"),
}
ONE_BF16 = 2.0**-8
"""Half a unit in the last place, relative."""


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = load_library(variant=request.param)
    """With one thread: where tests run side by side, two that wait for each other take their time."""
    before = library.threads
    library.threads = 1
    yield library
    library.threads = before


@pytest.fixture(params=["auto", "int8"])
def kernels(request: pytest.FixtureRequest, library: Library) -> NativeKernels:
    return NativeKernels(library, request.param)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed, in bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(x: Tensor, group: int, *, fused: bool) -> Tensor:
    """What int8 makes of fp32 or bf16 `x` in groups along the last dimension, float64. Ties are frequent, as bf16 has
    few digits: `fused` when the product with a scale is rounded only once, to a whole number."""
    groups = pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    peak = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    inverse = torch.full_like(peak, 127) / peak
    whole = torch.round(groups.double() * inverse.double() if fused else groups * inverse)
    return (whole.double() * (peak / 127)).flatten(-2)[..., : x.shape[-1]]


def product(kernels: NativeKernels, x: Tensor, weight: Tensor) -> Tensor:
    """What a linear should give before rounding, float64."""
    if kernels.name.endswith("int8"):
        numbers = quantized(x, 32, fused="plain" not in kernels.name)
        return numbers @ quantized(weight, weight.shape[1], fused=False).T
    return x.double() @ weight.double().T


def assert_near(got: Tensor, wanted: Tensor, relative: float) -> None:
    """Each value to `relative` of itself and to what fp32 loses in a sum."""
    slack = relative * wanted.abs() + 1e-5 * wanted.abs().max()
    assert ((got.double() - wanted).abs() <= slack).all()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "width"), SIZES)
def test_products_are_those_of_float64(kernels: NativeKernels, out: int, width: int) -> None:
    weight, bias = numbers(out, width), torch.randn(out)
    for rows in (1, 3, 8, 9, 20):
        x, stream = numbers(rows, width, seed=rows), torch.randn(rows, out)
        wanted = product(kernels, x, weight) + bias
        wide = kernels.linear(weight, bias, slot="wide", wide=True)(x)
        narrow = kernels.linear(weight.float(), bias, slot="narrow")(x)
        added = kernels.adding(weight.half().float(), bias)(x, stream.clone())
        assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
        assert_near(wide, wanted, 1e-5)
        assert_near(narrow, wanted, ONE_BF16)
        assert_near(added, stream + wanted, 1e-5)


def test_without_rounding_sums_are_exact_to_fp32(library: Library) -> None:
    weight, x = numbers(100, 1537), numbers(33, 1537, seed=1)
    got = NativeKernels(library).linear(weight, None, slot="wide", wide=True)(x)
    assert (got - x.double() @ weight.double().T).abs().max() < 2e-4


def test_a_routers_linear_keeps_bf16(library: Library) -> None:
    weight, x = numbers(60, 64), numbers(3, 64, seed=1)
    exact = NativeKernels(library).linear(weight, None, slot="logits", wide=True)(x)
    int8 = NativeKernels(library, "int8")
    assert torch.equal(int8.router(weight)(x), exact)
    assert not torch.equal(int8.linear(weight, None, slot="logits", wide=True)(x), exact)


@pytest.mark.parametrize("activation", Activation)
def test_gated_is_the_activation_times_up(kernels: NativeKernels, activation: Activation) -> None:
    for (out, width), rows in zip(SIZES, (1, 8, 9, 2, 5, 33), strict=True):
        gate, up, x = numbers(out, width) * 0.3, numbers(out, width, seed=1), numbers(rows, width, seed=2)
        biases = (torch.randn(out), torch.randn(out)) if rows != 8 else None
        left, right = product(kernels, x, gate), product(kernels, x, up)
        if biases:
            left, right = left + biases[0], right + biases[1]
        got = kernels.gated(gate, up, biases, activation, slot="inner")(x)
        assert_near(got, ACTIVATIONS[activation](left) * right, 2 * ONE_BF16)


def test_activations_keep_their_limits(library: Library) -> None:
    x = torch.tensor([-1e15, -200.0, -88.0, -20.0, -1.0, -1e-3, 1e-3, 0.5, 1.0, 4.0, 20.0, 88.0, 200.0, 1e4, 1e15])
    x = x.bfloat16().double()
    for activation, function in ACTIVATIONS.items():
        gated = NativeKernels(library).gated(torch.ones(1, 1), torch.ones(1, 1), None, activation, slot="inner")
        got = gated(x[:, None].bfloat16())[:, 0].double()
        assert (got / x**2 - function(x) / x).abs().max() < 2 * ONE_BF16


def test_weights_of_every_format_and_slices_of_them_pack_alike(kernels: NativeKernels) -> None:
    wide = numbers(70, 90).half().bfloat16()  # what fp16 and bf16 both can say
    x = numbers(5, 50, seed=1)
    results = [
        kernels.linear(weight, None, slot=str(index), wide=True)(x)
        for index, weight in enumerate(
            (
                wide[:, 20:70].contiguous(),
                wide[:, 20:70],
                wide[:, 20:70].float(),
                wide.half()[:, 20:70],
                wide.T.contiguous().T[:, 20:70],
            )
        )
    ]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_norms_are_rms_norms(library: Library) -> None:
    kernels = NativeKernels(library)
    for width in (1, 5, 16, 64, 576, 1000):
        x, weight = torch.randn(7, width) * 3, torch.rand(width) + 0.5
        wanted = x / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        assert_near(kernels.norm(weight, 1e-5, slot="normed")(x), wanted, 1.01 * ONE_BF16)
        heads, before = numbers(5, 4 * width + 3), numbers(5, 4 * width + 3)
        each = torch.rand(3, width) + 0.5
        kernels.head_norm(each, 1e-6)(heads)
        part = before[:, : 3 * width].double().unflatten(1, (3, width))
        wanted = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * each
        assert_near(heads[:, : 3 * width], wanted.flatten(1), 1.01 * ONE_BF16)
        assert torch.equal(heads[:, 3 * width :], before[:, 3 * width :])


def has_native_kernels(config: Any) -> bool:
    """Whether they have all that a family needs: neither LayerNorm nor MLA, and heads of whole tiles."""
    if config.model_type in ("gpt2", "gpt_bigcode", "gpt_neox", "falcon") or getattr(config, "kv_lora_rank", None):
        return False
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim % 16 == 0


@pytest.mark.parametrize("family", [name for name, config in FAMILIES.items() if has_native_kernels(config)])
def test_a_model_is_as_close_as_transformers_in_bf16(tmp_path: Path, family: str, one_thread: None) -> None:
    model = save_model(FAMILIES[family], tmp_path)
    tokens, chunks = prompt(40, seed=1), [9, 1, 1, 14, 1, 7, 1, 1, 5]
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    exact = oracle(model, tokens)[ends]
    for world in (1, 3):
        options = {"dtype": "bf16", "precision": Precision.BF16, "block_size": 16}
        ranks = Ranks(tmp_path, world, kernels="native", **options)
        got = ranks.walk(tokens, chunks, tables(64, [10])[0])
        ranks.close()
        theirs = oracle(model.to(torch.bfloat16), tokens)[ends]
        assert (got - exact).square().mean() < 1.2 * (theirs - exact).square().mean()


# -- row invariance ----------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_among_any_others(kernels: NativeKernels, library: Library) -> None:
    width, out = 97, 115
    weight, up, bias, x = numbers(out, width), numbers(out, width, seed=1), torch.randn(out), numbers(70, width, seed=2)
    stream = torch.randn(70, out)
    linear = kernels.linear(weight, bias, slot="wide", wide=True)
    gated = kernels.gated(weight, up, (bias, bias), Activation.SILU, slot="inner")
    adding = kernels.adding(weight, bias)

    def results(part: slice) -> tuple[Tensor, ...]:
        rows = x[part]
        return linear(rows).clone(), gated(rows).clone(), adding(rows, stream[part].clone())

    singles = [torch.cat(each) for each in zip(*(results(slice(i, i + 1)) for i in range(70)), strict=True)]
    for threads, counts in ((1, range(1, 71)), (2, (1, 2, 7, 8, 9, 16, 17, 32, 33, 70))):
        library.threads = threads
        for rows in counts:
            first = (70 - rows) // 2
            for got, wanted in zip(results(slice(first, first + rows)), singles, strict=True):
                assert torch.equal(got, wanted[first : first + rows]), (threads, rows)


def test_tiles_of_any_width_give_the_same_bits(library: Library) -> None:
    """Tiles are made for a number of threads; that number shows in no result."""
    weight, x = numbers(16 * 20, 64), numbers(13, 64, seed=1)
    found = {}
    for threads in (1, 2, 7, 20):
        library.threads = threads
        linear = NativeKernels(library).linear(weight, None, slot="wide", wide=True)
        library.threads = 1
        found[tile_width(320, threads)] = linear(x)
    assert sorted(found) == [1, 2, 3] or sorted(found) == [1, 2]
    assert all(torch.equal(result, found[1]) for result in found.values())


def test_many_rows_split_over_threads_keep_their_bits(kernels: NativeKernels, library: Library) -> None:
    weight, x = numbers(48, 64), numbers(300, 64, seed=1)
    linear = kernels.linear(weight, None, slot="wide", wide=True)
    alone = linear(x).clone()
    for threads in (2, 3, 8):
        library.threads = threads
        assert torch.equal(linear(x), alone)


@pytest.mark.parametrize("out", [40_000, 40_007])
def test_results_larger_than_the_caches_are_the_same(kernels: NativeKernels, out: int) -> None:
    weight, x = numbers(out, 8), numbers(20, 8, seed=1)
    linear = kernels.linear(weight, None, slot="wide", wide=True)
    single = torch.cat([linear(x[i : i + 1]).clone() for i in range(20)])
    assert torch.equal(linear(x), single)


@pytest.mark.parametrize("size", [7, 100, 576])
def test_a_norm_that_is_added_is_an_rms_norm_and_keeps_a_row_s_bits(library: Library, size: int) -> None:
    torch.manual_seed(2)
    weight, x, stream = torch.rand(size) + 0.5, 3 * torch.randn(40, size), torch.randn(40, size)
    onto = NativeKernels(library).adding_norm(weight, 1e-5)
    wanted = stream + x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    single = torch.cat([onto(x[i : i + 1], stream[i : i + 1].clone()) for i in range(40)])
    assert (single - wanted).abs().max() < 1e-5
    assert torch.equal(onto(x, stream.clone()), single)
    with pytest.raises(ValueError, match="a norm is added as fp32"):
        onto(x, stream.bfloat16())


def test_norms_keep_a_row_s_bits(library: Library) -> None:
    kernels, x, heads = NativeKernels(library), torch.randn(70, 1000), numbers(70, 400)
    norm, head_norm = kernels.norm(torch.rand(1000), 1e-5, slot="normed"), kernels.head_norm(torch.rand(3, 100), 1e-5)
    single = torch.cat([norm(x[i : i + 1]).clone() for i in range(70)])
    for rows in (1, 2, 16, 17, 70):
        assert torch.equal(norm(x[:rows]), single[:rows])
    apart, together = heads.clone(), heads.clone()
    for i in range(70):
        head_norm(apart[i : i + 1])
    head_norm(together)
    assert torch.equal(apart, together)


def test_a_row_of_nan_is_its_own_affair(kernels: NativeKernels) -> None:
    weight, x = numbers(60, 64), numbers(11, 64, seed=1)
    linear = kernels.linear(weight, None, slot="wide", wide=True)
    clean = linear(x).clone()
    for bad in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[4, 7] = bad
        got = linear(spoiled)
        assert not got[4].isfinite().any()
        assert torch.equal(got[:4], clean[:4]) and torch.equal(got[5:], clean[5:])


# -- buffers and refusals ----------------------------------------------------------------------------------------------


def test_adding_changes_the_stream_it_got(library: Library) -> None:
    stream = torch.zeros(3, 20)
    adding = NativeKernels(library).adding(numbers(20, 8), None)
    assert adding(numbers(3, 8), stream) is stream and stream.any()
    other = torch.zeros(3, 20)
    adding(numbers(3, 8), other)
    assert torch.equal(other, stream)


def test_one_linear_serves_other_rows_and_tensors_every_time(library: Library) -> None:
    weight = numbers(20, 8)
    linear = NativeKernels(library).linear(weight, None, slot="out", wide=True)
    for rows in (3, 1, 40, 3):
        x = numbers(rows, 8, seed=rows)
        wanted = (x.double() @ weight.double().T).float()
        assert torch.allclose(linear(x), wanted, atol=1e-4)
        assert torch.allclose(linear(x.clone()), wanted, atol=1e-4)
        wide = numbers(rows, 30, seed=rows)
        assert torch.allclose(linear(wide[:, 5:13]).double(), wide[:, 5:13].double() @ weight.double().T, atol=1e-4)


def test_what_does_not_fit_never_reaches_the_library(library: Library) -> None:
    kernels = NativeKernels(library)
    linear, adding = kernels.linear(numbers(20, 8), None, slot="out"), kernels.adding(numbers(20, 8), None)
    x = numbers(3, 8)
    for wrong in (x.float(), numbers(3, 9), x[:, ::2], numbers(8, 3).T, numbers(0, 8)):
        with pytest.raises(ValueError, match="a linear takes bf16"):
            linear(wrong)
    for stream in (torch.zeros(3, 21), torch.zeros(2, 20), torch.zeros(3, 20).bfloat16(), torch.zeros(20, 3).T):
        with pytest.raises(ValueError, match="the stream must be fp32"):
            adding(x, stream)
    with pytest.raises(ValueError, match="of one shape"):
        kernels.gated(numbers(20, 8), numbers(21, 8), None, Activation.SILU, slot="inner")
    with pytest.raises(ValueError, match="every bias must be"):
        kernels.linear(numbers(20, 8), torch.zeros(21), slot="out")
    with pytest.raises(ValueError, match="share the slot"):
        kernels.linear(numbers(20, 20), None, slot="out")(linear(x))
    with pytest.raises(ValueError, match="a norm takes fp32"):
        kernels.norm(torch.ones(8), 1e-5, slot="normed")(x)
    with pytest.raises(ValueError, match="a head norm takes bf16"):
        kernels.head_norm(torch.ones(2, 8), 1e-5)(x)
    with pytest.raises(ValueError, match="weight_precision"):
        NativeKernels(library, "int3")


def test_a_linear_works_on_after_a_refusal(library: Library) -> None:
    linear = NativeKernels(library).linear(numbers(20, 8), None, slot="out", wide=True)
    x = numbers(3, 8)
    wanted = linear(x).clone()
    with pytest.raises(ValueError, match="a linear takes"):
        linear(x.float())
    assert torch.equal(linear(x), wanted)


def test_a_slot_is_one_buffer_that_grows() -> None:
    workspace = Workspace()
    first = workspace.take("a", 4, 8, torch.float32)
    assert workspace.take("a", 4, 8, torch.float32) is first
    assert workspace.take("a", 2, 8, torch.bfloat16).data_ptr() == first.data_ptr()
    assert workspace.take("b", 4, 8, torch.float32).data_ptr() != first.data_ptr()
    grown = workspace.take("a", 5, 8, torch.float32)
    assert grown.shape == (5, 8) and workspace.take("a", 4, 8, torch.float32).data_ptr() == grown.data_ptr()
    assert workspace.bytes == 5 * 8 * 4 + 4 * 8 * 4
    for rows in range(1, 600):
        workspace.take("b", rows, 1, torch.float32)
    assert workspace.take("b", 3, 1, torch.float32).shape == (3, 1)
    with pytest.raises(ValueError, match="is empty"):
        workspace.take("a", 0, 8, torch.float32)


def test_an_arena_s_pieces_are_aligned_and_apart() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 100, 64, 70 * 2**20, 5)]
    for index, piece in enumerate(pieces):
        piece.fill_(index)
    assert all(piece.data_ptr() % 64 == 0 and bool((piece == index).all()) for index, piece in enumerate(pieces))
    assert Arena(exact=True).take(77).untyped_storage().nbytes() == 77


@pytest.mark.parametrize(
    ("outputs", "threads", "width"), [(576, 2, 3), (49_152, 2, 3), (320, 1, 2), (16, 4, 1), (96, 2, 3), (576, 16, 3)]
)
def test_tiles_are_as_wide_as_the_busiest_thread_allows(outputs: int, threads: int, width: int) -> None:
    assert tile_width(outputs, threads) == width
