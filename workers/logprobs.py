"""Logprobs: log-probabilities of consecutive tokens, packed: 4 bytes a number, so that many may wait and travel.

Plain values: knows neither tensors nor text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NUMBER = 4
"""Bytes of a value (fp32) and of an id (int32), little-endian."""


class TokenLogprobs(NamedTuple):
    """The log-probability of one token, and (id, log-probability) of the likeliest at its place, the likeliest first,
    the lowest id first among equals."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms: the log-softmax, in fp32, of the model's own logits, before temperature, filters and
    penalties. For each token its own one and those of the `top` likeliest, as `values` (1 + top numbers), and their
    `ids` (top numbers)."""

    top: int
    values: bytes = b""
    ids: bytes = b""

    def __len__(self) -> int:
        return len(self.values) // (_NUMBER * (1 + self.top))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        top = self.top
        values = struct.iter_unpack(f"<{1 + top}f", self.values)
        ids = struct.iter_unpack(f"<{top}i", self.ids) if top else (() for _ in range(len(self)))
        for own, names in zip(values, ids, strict=True):
            yield TokenLogprobs(own[0], tuple(zip(names, own[1:], strict=True)))

    def since(self, start: int) -> Logprobs:
        """Without the first `start` tokens."""
        if not start:
            return self
        each = _NUMBER * self.top
        return Logprobs(self.top, self.values[(each + _NUMBER) * start :], self.ids[each * start :])

    def until(self, stop: int) -> Logprobs:
        """The first `stop` tokens."""
        each = _NUMBER * self.top
        return Logprobs(self.top, self.values[: (each + _NUMBER) * stop], self.ids[: each * stop])


def pack(tokens: Sequence[TokenLogprobs], top: int) -> Logprobs:
    """The packed form of `tokens`, each with `top` likeliest ones."""
    values = b"".join(struct.pack(f"<{1 + top}f", one.logprob, *(value for _, value in one.top)) for one in tokens)
    ids = b"".join(struct.pack(f"<{top}i", *(id for id, _ in one.top)) for one in tokens)
    return Logprobs(top, values, ids)


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """One after the other, at least one. All have the same `top`."""
    if len(parts) == 1:
        return parts[0]
    if len({part.top for part in parts}) > 1:
        raise ValueError(f"log-probabilities with {sorted({part.top for part in parts})} alternatives do not join")
    return Logprobs(parts[0].top, b"".join(part.values for part in parts), b"".join(part.ids for part in parts))


def follow(before: Logprobs | None, after: Logprobs | None) -> Logprobs | None:
    """`after` behind `before`, either of which may be missing."""
    if before is None or after is None:
        return after if before is None else before
    return join((before, after))
