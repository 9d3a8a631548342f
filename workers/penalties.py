"""Penalties on logits before a token is drawn: what was said already, what the client wants more or less of, what may
not come yet. All rows that ask at once; the others are not touched.

In this order: repetition (arXiv 1909.05858, over prompt and output: positive logits divided, negative ones multiplied),
frequency and presence (OpenAI's, over the output alone, subtracted), bias (added), then the tokens that are banned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.plan import Bend, Draw


def bent_rows(draws: Sequence[Draw]) -> list[int]:
    """The rows whose draws ask for it."""
    return [row for row, draw in enumerate(draws) if draw.bend is not None]


def bend(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Change the rows of `logits` (fp32 [S, vocabulary]) whose draws ask for it, in place."""
    bends = [(row, draw.bend) for row, draw in enumerate(draws) if draw.bend is not None]
    _repeat(logits, [(row, one) for row, one in bends if one.penalties.repetition != 1.0])
    _subtract(logits, [(row, one) for row, one in bends if one.penalties.presence or one.penalties.frequency])
    biased = [(row, id, value) for row, one in bends for id, value in one.penalties.bias]
    if biased:
        rows, ids, values = zip(*biased, strict=True)
        at = _on(logits, rows), _on(logits, ids)
        logits[at] += torch.tensor(values, dtype=torch.float32, device=logits.device)
    banned = [(row, id) for row, one in bends for id in one.banned]
    if banned:
        rows, ids = zip(*banned, strict=True)
        logits[_on(logits, rows), _on(logits, ids)] = -torch.inf


def _repeat(logits: Tensor, bends: Sequence[tuple[int, Bend]]) -> None:
    if not bends:
        return
    rows, ids, _ = _counted(logits.shape[1], ((row, (*one.prompt, *one.output)) for row, one in bends))
    at = _on(logits, rows), _on(logits, ids)
    factor = _by_row(logits, ((row, one.penalties.repetition) for row, one in bends))[at[0]]
    known = logits[at]
    logits[at] = torch.where(known > 0, known / factor, known * factor)


def _subtract(logits: Tensor, bends: Sequence[tuple[int, Bend]]) -> None:
    rows, ids, counts = _counted(logits.shape[1], ((row, one.output) for row, one in bends))
    if not len(rows):
        return
    at = _on(logits, rows), _on(logits, ids)
    presence = _by_row(logits, ((row, one.penalties.presence) for row, one in bends))[at[0]]
    frequency = _by_row(logits, ((row, one.penalties.frequency) for row, one in bends))[at[0]]
    logits[at] -= frequency * torch.from_numpy(counts).to(logits.device) + presence


def _counted(
    vocabulary: int, told: Iterable[tuple[int, Sequence[int]]]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each (row, token) once: rows, tokens, and how often."""
    places = [np.asarray(tokens, np.int64) + row * vocabulary for row, tokens in told]
    found, counts = np.unique(np.concatenate(places) if places else np.empty(0, np.int64), return_counts=True)
    return found // vocabulary, found % vocabulary, counts


def _by_row(logits: Tensor, told: Iterable[tuple[int, float]]) -> Tensor:
    """A number for each row, 0 where none is told."""
    values = torch.zeros(len(logits))
    for row, value in told:
        values[row] = value
    return values.to(logits.device)


def _on(logits: Tensor, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
    return torch.as_tensor(np.asarray(numbers, np.int64), device=logits.device)
