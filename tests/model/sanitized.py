"""The native kernels under AddressSanitizer and UBSan: a program, `python -m tests.model.sanitized VARIANT [PART…]`,
and a plugin that runs any test with the debug build, `pytest -p tests.model.sanitized PATH…`.

The process must have libasan preloaded (see `environment`). Every part calls functions of a debug build with the
awkward sizes: one row, odd widths, one more than a tile; inputs and outputs are exactly as large as they must be, so
that one element too many is seen. Results are compared with plain torch, roughly: what counts is that nothing is read
or written where it should not.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from kvstore.layout import KVLayout, LayerKV, Precision
from workers.kernels import Activation, Kernels
from workers.native import library as loading
from workers.native.library import Library, load_library
from workers.native.pairs import PAIRS, parts_of
from workers.native.processor import Processor
from workers.plan import Draw
from workers.sampler import sample

ROWS = (1, 2, 7, 8, 9, 17, 33)
WIDTHS = ((16, 1), (33, 47), (64, 48), (130, 101))
"""(in, out): not even, not a multiple of any tile, exactly one tile."""
_NUMBERS = itertools.count()
HEADS = ((2, 16), (3, 80))
TOLERANCE = {"": 0.05, "int8": 0.15}
"""Of bf16 results and of those with int8 weights, in units of the result's own spread."""


def environment() -> dict[str, str]:
    """What the program needs in its environment: the sanitizer's runtime before everything else."""
    paths = [_of_gcc(name) for name in ("libasan.so", "libstdc++.so")]
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0"}


def _of_gcc(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


def pretend_debug(variant: str) -> Library:
    """From now on every `load_library` of this process gives the debug build of `variant`."""
    pairs = [KVLayout(64, (LayerKV.pair(1, 16, *pair),)) for pair in PAIRS]
    library = load_library(variant=variant, debug=True, parts=[part for pair in pairs for part in parts_of(pair)])
    loading.load_library = lambda *_, **__: library  # type: ignore[assignment]
    return library


# -- linears and norms -------------------------------------------------------------------------------------------------


def linears(kernels: Kernels, slack: float) -> None:
    """Every epilogue at every size, with and without bias, packed from every dtype."""
    for rows, (width, out) in product(ROWS, WIDTHS):
        for bias, dtype in ((True, torch.float32), (False, torch.bfloat16), (True, torch.float16)):
            weight, x = _random(out, width).to(dtype), _random(rows, width).to(kernels.dtype)
            shift = _random(out) if bias else None
            expected = linear(x.float(), weight.float(), shift)
            near(kernels.linear(weight, shift, slot=_slot())(x), expected, slack)
            near(kernels.linear(weight, shift, slot=_slot(), wide=True)(x), expected, slack)
            stream = _random(rows, out).to(kernels.stream)
            near(kernels.adding(weight, shift)(x, stream.clone()), stream + expected, slack)


def gates(kernels: Kernels, slack: float) -> None:
    """The gated MLP's first half with each activation."""
    functions = {
        Activation.SILU: silu,
        Activation.GELU: gelu,
        Activation.GELU_TANH: functools.partial(gelu, approximate="tanh"),
    }
    for rows, (width, out), activation in product((1, 5, 17), WIDTHS, Activation):
        gate, up, x = _random(out, width), _random(out, width), _random(rows, width).to(kernels.dtype)
        biases = (_random(out), _random(out)) if rows == 5 else None
        left, right = (linear(x.float(), w, biases and biases[i]) for i, w in enumerate((gate, up)))
        got = kernels.gated(gate, up, biases, activation, slot=_slot())(x)
        near(got, functions[activation](left) * right, slack)


def norms(kernels: Kernels, slack: float) -> None:
    """RMSNorm of rows and of heads."""
    for rows, width in product(ROWS, (16, 33, 144)):
        weight, x = _random(width), _random(rows, width).to(kernels.stream)
        near(kernels.norm(weight, 1e-5, slot=_slot())(x.clone()), _normed(x.float(), weight), slack)
    for rows, (heads, size), more in product((1, 5, 17), HEADS, (0, 1)):
        weight = _random(heads, size)
        x = _random(rows, (heads + more) * size).to(kernels.dtype)
        expected = x.clone().float()
        part = expected[:, : heads * size].unflatten(-1, (heads, size))
        expected[:, : heads * size] = _normed(part, weight).flatten(1)
        kernels.head_norm(weight, 1e-5)(x)
        near(x, expected, slack)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _slot() -> str:
    """A slot of its own: a buffer that nothing larger has used before."""
    return f"slot {next(_NUMBERS)}"


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape)


def near(got: Tensor, expected: Tensor, slack: float) -> None:
    """`got` is `expected`, within `slack` times the spread."""
    assert got.shape == expected.shape, f"{tuple(got.shape)}, expected {tuple(expected.shape)}"
    spread = max(1.0, float(expected.abs().max()))
    found = float((got.float() - expected.float()).abs().max())
    assert found <= slack * spread, f"off by {found:.3g} of {spread:.3g}"


def sampling(kernels: Kernels) -> None:
    """Every kind of draw over odd vocabularies, alone and among others, against the rule in torch."""
    kinds = [Draw(), Draw(1.0, seed=1), Draw(0.7, top_k=5, seed=2), Draw(1.5, top_p=0.8, min_p=0.01, seed=3)]
    for vocabulary, rows in product((1, 2, 15, 16, 17, 1001), (1, 4, 9)):
        draws = [replace(kinds[row % 4], position=row) for row in range(rows)]
        logits = _random(rows, vocabulary)
        assert kernels.sampler()(logits, draws) == sample(logits, draws)


# -- attention ---------------------------------------------------------------------------------------------------------

STEPS = ([(0, 20), (1, 1), (2, 65)], [(0, 1), (1, 1), (2, 1)], [(2, 17), (0, 1), (1, 15)])
RULES: tuple[dict[str, Any], ...] = ({}, {"window": 21}, {"softcap": 3.0, "window": 40})


def attention(library: Library) -> Iterator[str]:
    """Every pair of formats: single tokens and chunks, windows whose blocks are gone, caps and sinks, in one thread and
    in several, over a context that is cut into partitions."""
    from tests.model.attended import Attended

    for pair in PAIRS:
        shapes = ((3, 2, 80, 16), (1, 5, 16, 48 if not pair[0].by_channel else 32))
        for (heads, ratio, dim, block_size), rule in product(shapes, RULES):
            sinks = torch.randn(heads * ratio) if rule else None
            if pair[0].by_channel:
                block_size *= 4
            options: dict[str, Any] = {"block_size": block_size, "precision": pair, "lengths": (41, 20, 90)}
            device = Attended(library, heads, ratio, dim, sinks=sinks, **options, **rule)
            expected = None if rule else Attended(None, heads, ratio, dim, **options)
            for step in STEPS:
                got = torch.cat(device.run(step))
                assert got.isfinite().all()
                if expected:
                    near(got, torch.cat(expected.run(step)), 0.05)
        threads, library.threads = library.threads, 3
        long = Attended(library, 1, 3, 32, precision=pair, lengths=(1100,))
        assert torch.cat([long.walk(0, [1090]), long.walk(0, [1, 9])]).isfinite().all()
        library.threads = threads
        yield "-".join(precision.label for precision in pair)


# -- whole models ------------------------------------------------------------------------------------------------------


def models(variant: str) -> Iterator[str]:
    """Tiny models of several families through rope, KV write, attention and the rest: chunks, single tokens and mixed
    steps, in blocks of 16 that lie anywhere, with every KV precision."""
    from tests.model.tiny import FAMILIES, Ranks, prompt, row, save_model, tables

    for family, precision in (("qwen3", "bf16"), ("smollm2", "int8"), ("mistral", "fp16"), ("qwen2", "bf16")):
        with tempfile.TemporaryDirectory() as folder:
            save_model(FAMILIES[family], Path(folder))
            made = []
            for kernels in (f"native-{variant}", "torch-bf16"):
                options: dict[str, Any] = {"precision": Precision.parse(precision), "block_size": 16}
                ranks = Ranks(Path(folder), dtype="bf16", kernels=kernels, blocks=24, **options)
                first, second = tables(24, [6, 3])
                tokens, others = prompt(83), prompt(40, seed=2)
                seen = [ranks.walk(tokens[:50], [17, 1, 16, 15, 1], first)]
                seen.append(ranks.walk(others[:15], [15], second))
                mixed = row(tokens[50:82], 50, first), row(others[15:16], 15, second)
                seen.append(ranks.logits(*mixed))
                seen.append(ranks.logits(row(tokens[82:], 82, first), row(others[16:17], 16, second)))
                made.append(torch.cat(seen))
                ranks.close()
            near(made[0], made[1], 0.15)
            yield f"{family} with {precision} keys and values"


def pytest_configure() -> None:
    """As a plugin: the tests load the debug build."""
    pretend_debug(Processor.read().variants[0].name)


def main(variant: str, wanted: list[str]) -> None:
    library = pretend_debug(variant)
    torch.manual_seed(5)
    from workers.native.kernels import NativeKernels

    parts: dict[str, Callable[[Kernels, float], None]] = {"linears": linears, "gates": gates, "norms": norms}
    with torch.inference_mode():
        for (name, part), precision in product(parts.items(), ("", "int8")):
            if not wanted or name in wanted:
                part(NativeKernels(library, precision or "auto"), TOLERANCE[precision])
                print("clean:", name, precision, flush=True)
    if not wanted or "sampling" in wanted:
        sampling(NativeKernels(library))
        print("clean: sampling", flush=True)
    if not wanted or "attention" in wanted:
        for name in attention(library):
            print("clean: attention", name, flush=True)
    if not wanted or "models" in wanted:
        for name in models(variant):
            print("clean:", name, flush=True)
    print("all clean")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
