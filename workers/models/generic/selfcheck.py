"""SelfCheck: a generic model answers through the paged pool as it does by itself, or it is not served.

Two sequences share steps, with prompts in chunks, and are continued greedily; then transformers' own modules compute
each of them in one piece, without a cache. Every token must be the one that they would have chosen, save where two were
as good as equal to them, and the logits must agree. Knows no model by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor

from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from workers.batch import Batcher
from workers.kernels import Kernels
from workers.kvpool import KVPool
from workers.models.generic.model import GenericModel
from workers.models.generic.spec import GenericSpec
from workers.models.rope import Unsupported
from workers.plan import Draw, Row, StepPlan

VERSION = 1
"""Raise it when the check becomes stricter: what was remembered before does not count then."""
_BLOCK = 16
_PROMPTS = (40, 23)
_CHUNKS = (16, 7)
_OUTPUT = 24
_DRIFT = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""How far logits may lie apart, as a share of their spread: rounding, which differs with the order of sums."""
_PRECISIONS = {torch.float32: Precision.FP32, torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Where it is remembered that a model has passed: in a file per model under `folder` (None: nowhere). `revision`
    identifies the weights; without one nothing is remembered."""

    folder: Path | None = None
    revision: str = ""

    def demand(self, model: GenericModel, spec: GenericSpec, kernels: Kernels, device: torch.device) -> None:
        """Raises Unsupported unless `model` passes, now or earlier with the same weights, libraries and kernels."""
        facts = {
            "architecture": spec.architecture,
            "revision": self.revision,
            "kernels": kernels.name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "version": VERSION,
        }
        path = self._path(facts)
        if path is not None and path.is_file():
            return
        try:
            check(model, spec, kernels, device)
        except Unsupported:
            raise
        except Exception as error:  # whatever foreign code does with a packed step
            why = f"its check against the plain model failed: {error!r}"
            raise Unsupported(f"{spec.architecture} cannot be served: {why}") from error
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(f".{os.getpid()}.partial")
            fresh.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            fresh.rename(path)

    def _path(self, facts: dict[str, object]) -> Path | None:
        if self.folder is None or not self.revision:
            return None
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"{name}.json"


@dataclass
class _Sequence:
    """`tables`, one per layer group, cover all its tokens; `done` of them are computed; `logits` are those of each
    token that was drawn."""

    tokens: list[int]
    chunk: int
    tables: tuple[tuple[int, ...], ...]
    prompt: int
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def row(self) -> Row:
        """Its next piece."""
        part = self.tokens[self.done : self.done + self.chunk]
        last = self.done + len(part) == len(self.tokens)
        return Row(tuple(part), self.done, self.tables, Draw() if last else None)


def check(model: GenericModel, spec: GenericSpec, kernels: Kernels, device: torch.device) -> None:
    """Raises Unsupported with what differed."""
    rng = random.Random(spec.vocab_size)
    (layout,) = spec.layout(_BLOCK, PrecisionMap.uniform(_PRECISIONS[kernels.dtype]), 1)
    output = min(_OUTPUT, spec.context_length // 2)
    length = min(spec.context_length, max(_PROMPTS) + output)
    groups, size = len(layout.groups), layout.blocks_for(length)
    pool = KVPool(layout, len(_PROMPTS) * groups * size, device)
    ids = rng.sample(range(pool.blocks), pool.blocks)
    tables = [tuple(ids[start : start + size]) for start in range(0, pool.blocks, size)]
    sequences = [
        _Sequence(
            tokens=[rng.randrange(spec.vocab_size) for _ in range(min(count, length - output))],
            chunk=chunk,
            tables=tuple(tables[index * groups : (index + 1) * groups]),
            prompt=min(count, length - output),
        )
        for index, (count, chunk) in enumerate(zip(_PROMPTS, _CHUNKS, strict=True))
    ]
    _continue(sequences, output, model, kernels, pool)
    for sequence in sequences:
        _compare(sequence, model, spec, kernels.dtype, device)


def _continue(sequences: list[_Sequence], output: int, model: GenericModel, kernels: Kernels, pool: KVPool) -> None:
    """Compute all of them, with `output` tokens each."""
    backend, batcher = kernels.attention(pool, model.rules), Batcher(_BLOCK, pool.device)
    while running := [sequence for sequence in sequences if len(sequence.logits) < output]:
        rows = [sequence.row() for sequence in running]
        batch = batcher.build(StepPlan(0, tuple(rows)))
        hidden = model.forward(batch, backend)
        logits = iter(model.logits(hidden.index_select(0, batch.sampled)) if batch.draws else ())
        for sequence, row in zip(running, rows, strict=True):
            sequence.done += len(row.tokens)
            if row.draw is not None:
                sequence.logits.append(next(logits).clone())
                sequence.tokens.append(int(sequence.logits[-1].argmax()))


def _compare(
    sequence: _Sequence, model: GenericModel, spec: GenericSpec, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = torch.tensor(sequence.tokens[:-1], device=device)
    plain = model.plain(tokens)[sequence.prompt - 1 :]
    paged = torch.stack(sequence.logits)
    spread = float(plain.std())
    drift = (paged - plain).square().mean(-1).sqrt()
    chosen = paged.argmax(-1, keepdim=True)
    behind = (plain.max(-1, keepdim=True).values - plain.gather(-1, chosen))[:, 0]
    most = _DRIFT[dtype] * spread
    if bool((behind <= most).all()) and bool(drift.median() <= most):  # NaN fails both
        return
    worst = int(behind.nan_to_num(float("inf")).argmax())
    raise Unsupported(
        f"{spec.architecture} cannot be served: through the paged KV cache it does not compute what transformers' "
        f"modules compute by themselves. After a prompt of {sequence.prompt} tokens, output token {worst} was "
        f"{int(chosen[worst])}, which they rate {float(behind[worst]):.3g} below their choice, "
        f"{int(plain[worst].argmax())}; logits lie {float(drift.median()):.3g} apart, of a spread of {spread:.3g}"
    )
