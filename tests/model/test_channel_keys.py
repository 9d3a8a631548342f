"""Keys by channel: what is stored, and that every query reads what its position says, on every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvstore.layout import Precision
from tests.model.attended import Attended, Still
from workers.attention.formats import decode, encode, seal, unseal
from workers.native.library import Library, load_library
from workers.native.processor import Processor
from workers.rotation import rotate

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CHANNEL, INT4 = Precision.INT4_CHANNEL, Precision.INT4
DIM, HEADS, RATIO = 32, 2, 3
KINDS = ("plain", "outlier channels", "a constant channel", "zeros", "tiny", "far from zero")


def drawn(kind: str, tokens: int) -> Tensor:
    """Keys in bf16, as fp32 [5 blocks, heads, tokens, dim]."""
    keys = torch.randn(5, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(4))
    match kind:
        case "outlier channels":
            keys[..., 3:20:7] *= 30.0
        case "a constant channel":
            keys[..., 5] = 2.5
        case "zeros":
            keys[..., :20] = 0.0
        case "tiny":
            keys *= 1e-30
        case "far from zero":
            keys[..., 7] += 50.0
    return keys.bfloat16().float()


def read_back(keys: Tensor) -> Tensor:
    """Keys [..., tokens, d] as they are read once they are sealed."""
    packed, scales = seal(keys)
    each = torch.arange(packed[..., 0, 0].numel()).repeat_interleave(keys.shape[-2])
    out = torch.empty(packed[..., 0].numel(), keys.shape[-1])
    return unseal(packed.flatten(0, -2), scales.view(-1, 2, keys.shape[-1]), each, out).view(keys.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [16, 64])
def test_every_channel_comes_back_within_half_a_step_of_its_own_span(kind: str, tokens: int) -> None:
    keys = drawn(kind, tokens)
    span = keys.amax(-2, keepdim=True) - keys.amin(-2, keepdim=True)
    most = keys.abs().amax(-2, keepdim=True)
    error = (read_back(keys) - keys).abs()
    assert (error <= span * (0.5 / 15 + 2**-7) + most * 2**-20 + 1e-38).all()
    assert not error[(span == 0).expand_as(error)].any(), "a channel of one value is stored exactly"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_channel_of_the_block_and_no_other(odd: float) -> None:
    keys = torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(4)).bfloat16()
    spoiled = keys.clone()
    spoiled[1, 7, 9] = odd
    clean, mixed = read_back(keys), read_back(spoiled)
    assert mixed[1, :, 9].isnan().all()
    mixed[1, :, 9] = clean[1, :, 9]
    assert torch.equal(clean, mixed)


def device(backend: str, block_size: int, **rest: object) -> Attended:
    """With NaN in every slot that is not written."""
    library = load_library() if backend == "native" else None
    found = Attended(library, HEADS, RATIO, DIM, block_size=block_size, precision=(CHANNEL, INT4), **rest)  # type: ignore[arg-type]
    found.pool.columns[0].fill_(255)
    return found


def expected(of: Attended, sequence: int, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention in fp64 over what each query is to read: keys of its own block in bf16, of earlier ones as sealed."""
    size, heads = of.pool.block_size, of.heads[sequence].float().unflatten(-1, (-1, DIM))
    length = len(heads)
    first = heads.shape[1] - 2 * HEADS
    rotate(heads[:, : first + HEADS], of.turns.at(torch.arange(length)))
    query, key, value = heads.split((first, HEADS, HEADS), 1)
    key = key.bfloat16().float()
    sealed = key.clone()
    for block in range(length // size):
        part = slice(block * size, (block + 1) * size)
        sealed[part] = read_back(key[part].transpose(0, 1)).transpose(0, 1)
    value = decode(encode(value, INT4).view(-1, DIM // 2 + 4), INT4, torch.empty(length * HEADS, DIM)).view_as(value)
    places, queries = torch.arange(length), torch.arange(length)[:, None]
    scores = [
        torch.einsum("qhd,khd->hqk", query.double(), part.double().repeat_interleave(RATIO, 1))
        for part in (key, sealed)
    ]
    both = torch.where(places // size == queries // size, *scores) * DIM**-0.5
    if softcap is not None:
        both = softcap * torch.tanh(both / softcap)
    hidden = places > queries
    if window is not None:
        hidden |= places <= queries - window
    both.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        both = torch.cat((both, sinks.double()[:, None, None].expand(-1, length, 1)), -1)
    weights = both.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, value.double().repeat_interleave(RATIO, 1)).flatten(1)


RULES: list[dict[str, object]] = [
    {},
    {"window": 21},
    {"window": 100},
    {"softcap": 3.0, "sinks": torch.linspace(-1, 2, HEADS * RATIO)},
]
CHUNKS = [[300], [64, 64, 172], [1, 63, 64, 1, 100, 71], [31, 33, 236], [1] * 300]


BACKENDS = [("reference", 32), ("reference", 64), ("native", 64), ("native", 128)]
CLOSE = {"reference": 2e-4, "native": 0.03}
"""How far from fp64: the native kernels round queries, weights and what comes out. A wrong read is off by 0.5."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: ",".join(rule) + str(rule.get("window", "")))
@pytest.mark.parametrize(("backend", "block_size"), BACKENDS)
@pytest.mark.parametrize(
    "chunks", [[300], [64, 64, 172], [1, 63, 64, 1, 100, 71], [31, 33, 237 - 1], [1] * 300], ids=str
)
def test_every_query_reads_what_its_position_says(
    backend: str, block_size: int, rule: dict[str, object], chunks: list[int]
) -> None:
    found = device(backend, block_size, lengths=(300,), **rule)
    for key in range(HEADS):
        found.heads[0].unflatten(-1, (-1, DIM))[:, RATIO * HEADS + key, 4 + key] *= 12
    wanted = expected(found, 0, *(rule.get(name) for name in ("window", "softcap", "sinks")))  # type: ignore[arg-type]
    got = found.walk(0, chunks)
    assert (got - wanted).abs().max() < CLOSE[backend]


@pytest.mark.parametrize("backend", CLOSE)
def test_rows_of_all_kinds_share_a_step(backend: str) -> None:
    lengths = (130, 64, 200, 33)
    found = device(backend, 64 if backend == "native" else 32, lengths=lengths)
    wanted = [expected(found, sequence, None, None, None) for sequence in range(4)]
    got: list[list[Tensor]] = [[] for _ in lengths]
    for step in (
        [(0, 100), (1, 63), (2, 1), (3, 31)],
        [(1, 1), (0, 1), (3, 1), (2, 126)],
        [(0, 1), (2, 1), (3, 1)],
        [(0, 28), (2, 72)],
    ):
        for (sequence, _), part in zip(step, found.run(step), strict=True):
            got[sequence].append(part)
    for sequence in range(4):
        assert (torch.cat(got[sequence]) - wanted[sequence]).abs().max() < CLOSE[backend]


@pytest.fixture(params=[variant.name for variant in Processor.read().variants])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = load_library(variant=request.param)
    before = found.threads
    yield found
    found.threads = before


@pytest.mark.parametrize(("heads", "ratio", "dim", "window"), [(1, 1, 16, None), (1, 7, 80, 90), (2, 3, 64, None)])
def test_chunks_neighbours_blocks_and_threads_change_no_bit_of_the_native_kernel(
    library: Library, heads: int, ratio: int, dim: int, window: int | None
) -> None:
    lengths = (700, 33, 64, 97)
    shape: tuple[int, int, int] = (heads, ratio, dim)
    options = {"precision": (CHANNEL, INT4), "lengths": lengths, "window": window}
    library.threads = 1
    whole = Attended(library, *shape, **options).walk(0, [700])  # type: ignore[arg-type]
    near = Attended(None, *shape, **options).walk(0, [700])  # type: ignore[arg-type]
    assert (whole - near).abs().max() < CLOSE["native"]
    for threads, chunks in ((1, [64] * 10 + [60]), (3, [63, 1, 65, 511, 60]), (2, [1] * 130 + [570]), (3, [699, 1])):
        library.threads = threads
        assert torch.equal(Attended(library, *shape, seed=1, **options).walk(0, chunks), whole)  # type: ignore[arg-type]
    crowd = Attended(library, *shape, seed=2, **options)  # type: ignore[arg-type]
    parts = [crowd.run([(1, 10), (0, 80), (2, 1)])[1], crowd.run([(3, 96), (1, 22), (0, 1)])[2]]
    parts.append(crowd.run([(2, 63), (0, 619), (3, 1), (1, 1)])[1])
    assert torch.equal(torch.cat(parts), whole)


def test_the_native_kernel_seals_what_formats_has_in_every_build(library: Library) -> None:
    """Odd channels too: of one value, of zeros, with an outlier, with what is no number."""
    found = Attended(library, 1, 1, DIM, precision=(CHANNEL, INT4), lengths=(64,))
    found.turns = Still(DIM)
    keys = drawn("outlier channels", 64)[0, 0]
    keys[:, 1], keys[:, 2], keys[:, 9] = 3.25, 0.0, -7.0
    keys[9, 5], keys[9, 6], keys[9, 8] = float("nan"), float("inf"), 3e4
    found.heads[0][:, DIM : 2 * DIM] = keys.bfloat16()
    found.walk(0, [64])
    packed, scales = seal(keys[None])
    page = found.pool.pages[0][found.tables[0][0]]
    stored = page[-4 * DIM :].view(torch.bfloat16).view(DIM, 2).t()
    odd = torch.arange(4, 8)  # what turns an element brings its neighbour in, if only times 0
    assert stored[:, odd].isnan().all()
    plain = torch.ones(DIM, dtype=torch.bool).index_fill(0, odd, False)
    assert torch.equal(stored[:, plain], scales[0][:, plain])
    tiles = page[: -4 * DIM].view(4, -1)[:, : DIM // 8 * 16 * 4].contiguous().view(torch.int32)
    words = tiles.view(4, DIM // 8, 16)  # [tile, group of channels, slot]
    places = [index // 2 + index % 2 * 4 for index in range(8)]
    got = torch.stack([words >> 4 * place & 15 for place in places], -1).permute(0, 2, 1, 3).reshape(64, DIM)
    counts = torch.stack((packed[0] & 15, packed[0] >> 4), -1).view(64, DIM)
    assert torch.equal(got[:, plain], counts[:, plain].int())


def test_a_sealed_block_never_changes_and_an_open_one_has_no_scales() -> None:
    found = device("reference", 32, lengths=(100,))
    found.run([(0, 31)])
    block = found.tables[0][0]
    assert found.pool.scales(0)[block].isnan().all()
    found.run([(0, 1)])
    before = found.pool.pages[0][block].clone()
    assert found.pool.scales(0)[block].isfinite().all()
    found.run([(0, 68)])
    assert torch.equal(found.pool.pages[0][block], before)
