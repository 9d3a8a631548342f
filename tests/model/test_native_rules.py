"""Native attention under rules and strain: windows, soft caps, sinks; extreme scores, and what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.attended import Attended, Still, stored
from tests.model.builds import ALIKE, CLOSE, Pair, label
from workers.attention.formats import PLAIN, decode
from workers.native.library import Library
from workers.rotation import rotate

pytestmark = pytest.mark.model


def read(device: Attended) -> list[Tensor]:
    """Keys and values of the first sequence as they are in the cache, fp32 [tokens, heads, dim]."""
    found = []
    for part, vector in zip(stored(device), device.pool.layout.layers[0].vectors, strict=True):
        numbers = torch.empty(part.shape[:2].numel(), vector.elements)
        found.append(decode(part.flatten(0, 1), vector.precision, numbers).unflatten(0, part.shape[:2]))
    return found


def plainly(
    device: Attended,
    heads: int,
    ratio: int,
    dim: int,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the first sequence's tokens should get of what is in the cache by now, in fp64."""
    query = device.heads[0].float().unflatten(-1, (-1, dim))[:, : ratio * heads].contiguous()
    places = torch.arange(len(query))
    rotate(query, device.turns.at(places))
    query = query.bfloat16().double()
    key, value = (part.double().repeat_interleave(ratio, 1) for part in read(device))
    scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    behind = places[:, None] - places
    hidden = (behind < 0) | (behind >= (window or len(places)))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(places), 1)), -1)
    weights = scores.softmax(-1)[..., : len(places)]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1).float()


@pytest.mark.parametrize(("window", "cap"), [(1, None), (17, None), (64, 2.0), (100, None), (600, None), (None, 3.0)])
def test_window_and_soft_cap(build: tuple[Library, Pair], window: int | None, cap: float | None) -> None:
    library, pair = build
    length, shape = 640 if window == 600 else 180, (2, 3, 32)
    options = {"precision": pair, "lengths": (length,), "window": window, "softcap": cap}
    device = Attended(library, *shape, **options)
    whole = device.walk(0, [length])
    assert (whole - plainly(device, *shape, window=window, cap=cap)).abs().max() < CLOSE
    tail = Attended(library, *shape, seed=3, **options)
    assert torch.equal(tail.walk(0, [length - 39, 1, 7, 31]), whole)


def test_what_lies_before_the_window_is_never_read(build: tuple[Library, Pair]) -> None:
    """The blocks before it are gone, and the tokens beside it in its first block are NaN."""
    library, pair = build
    window, outputs = 36, []
    for poisoned in (False, True):
        device = Attended(library, 2, 3, 32, precision=pair, lengths=(200,), window=window)
        device.run([(0, 180)])
        first = 180 - window + 1  # what the next token sees first: an odd slot
        if poisoned:
            for block in device.tables[0][: first // 16]:
                device.pool.pages[0][block].fill_(255)
            for position in range(first // 16 * 16, first):
                device.store_nan(0, position)
        outputs.append(torch.cat([*device.run([(0, 1)]), *device.run([(0, 19)])]))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("pair", ALIKE, ids=label)
def test_a_token_matters_within_the_window_and_nowhere_else(fastest: Library, pair: Pair) -> None:
    changed, window = 70, 33
    plain, other = (Attended(fastest, 1, 3, 32, precision=pair, lengths=(160,), window=window) for _ in range(2))
    other.heads[0][changed] *= -1.5
    got, expected = (device.walk(0, [100, 1, 59]) for device in (other, plain))
    beyond = changed + window
    assert torch.equal(got[:changed], expected[:changed]) and torch.equal(got[beyond:], expected[beyond:])
    assert (got[changed:beyond] != expected[changed:beyond]).any(-1).all()


@pytest.mark.parametrize("pair", ALIKE, ids=label)
@pytest.mark.parametrize(("length", "window", "cap"), [(150, None, None), (150, 40, 4.0), (1100, None, None)])
def test_sinks_take_their_share(
    fastest: Library, length: int, window: int | None, cap: float | None, pair: Pair
) -> None:
    shape, sinks = (2, 3, 32), torch.tensor([0.0, 1.5, -3.0, 9.0, float("-inf"), 60.0])
    options = {"precision": pair, "lengths": (length,), "window": window, "softcap": cap, "sinks": sinks}
    device = Attended(fastest, *shape, **options)
    whole = device.walk(0, [length])
    expected = plainly(device, *shape, window=window, cap=cap, sinks=sinks)
    assert (whole - expected).abs().max() < CLOSE
    without = Attended(fastest, *shape, **{**options, "sinks": None}).walk(0, [length])
    assert torch.equal(whole[:, 4 * 32 : 5 * 32], without[:, 4 * 32 : 5 * 32])  # the sink that weighs nothing
    assert whole[:, 5 * 32 :].abs().max() < 1e-6
    fastest.threads = 3
    tail = Attended(fastest, *shape, seed=3, **options)
    assert torch.equal(tail.walk(0, [length - 39, 1, 7, 31]), whole)


# -- extreme values ----------------------------------------------------------------------------------------------------


def test_one_key_that_outweighs_all_others(build: tuple[Library, Pair]) -> None:
    """Scores of several hundred, rising step by step: the weights' reference point moves again and again."""
    library, pair = build
    device = Attended(library, 1, 1, 16, precision=pair, lengths=(300,))
    rise = torch.linspace(0, 40, 300)[:, None]
    device.heads[0][:, :16] = 10.0
    device.heads[0][:, 16:32] = rise.expand(-1, 16)
    device.turns = Still(16)
    got = device.walk(0, [300])
    keys, values = (
        decode(part[:, 0], precision, torch.empty(300, 16))
        for part, precision in zip(stored(device), pair, strict=True)
    )
    expected = torch.stack([_last_weighted(keys[: i + 1, 0], values[: i + 1]) for i in range(300)])
    assert (got - expected).abs().max() < 0.05


def _last_weighted(rise: Tensor, value: Tensor) -> Tensor:
    scores = rise.double() * 10.0 * 16 * 16**-0.5
    return (scores.softmax(0)[:, None] * value.double()).sum(0).float()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_finite_in_one_row_stays_in_it(build: tuple[Library, Pair], part: str, odd: float) -> None:
    library, pair = build
    device, clean = (Attended(library, 1, 3, 32, precision=pair, lengths=(40, 40)) for _ in range(2))
    device.turns = clean.turns = Still(32)
    device.heads[0][5, (3 if part == "key" else 4) * 32 + 7] = odd
    got, expected = device.run([(0, 40), (1, 40)]), clean.run([(0, 40), (1, 40)])
    kept = pair[0] if part == "key" else pair[1]
    if kept not in PLAIN or (part == "key" and odd != odd):
        assert got[0][6:].isnan().all()
    assert not torch.equal(got[0][6:], expected[0][6:])
    if pair[1] not in PLAIN:
        assert torch.equal(got[0][:5], expected[0][:5])
    assert torch.equal(got[1], expected[1])
