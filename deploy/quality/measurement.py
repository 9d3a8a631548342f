"""Measurement: a subject's KV precisions against its unquantised cache, over a text, a dialogue, greedy continuations.

Everything is paired: the same tokens through the same kernels, once with each cache. What a reading leaves behind are
hidden states, a few megabytes; logits are made of them piece by piece where two readings are compared. Knows neither
files nor limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from deploy.quality.dialogue import Script
from deploy.quality.figures import Cost, Estimate, parted
from deploy.quality.subject import Reading, Subject
from kvstore.precisions import PrecisionMap

Say = Callable[[str], None]

PIECE_BYTES = 2**25
"""How large one side's logits get at a time."""
PROMPTS, PROMPT_TOKENS, CONTINUED = 8, 96, 64
"""Greedy continuations: how many, after how much of the text, for how long."""


@dataclass(frozen=True, slots=True)
class Tokenwise:
    """One value per scored token, in the text's order: divergence in nats, whether the first choice is the same, and
    negative log likelihoods with either cache."""

    kl: list[float]
    same: list[bool]
    before: list[float]
    after: list[float]

    @property
    def cost(self) -> Cost:
        """Over all of them."""
        return Cost.of(self.kl, self.same, self.before, self.after)


def tokenwise(subject: Subject, before: Reading, after: Reading) -> Tokenwise:
    """Two readings of the same text, compared where a next token is known: T - 1 places."""
    found = Tokenwise([], [], [], [])
    piece = max(1, PIECE_BYTES // (4 * subject.spec.vocab_size))
    wanted = torch.tensor(before.tokens[1:], device=before.states.device)
    with torch.inference_mode():
        for first in range(0, len(wanted), piece):
            last = min(first + piece, len(wanted))
            plain = subject.logits(before.states[first:last]).log_softmax(-1)
            other = subject.logits(after.states[first:last]).log_softmax(-1)
            found.before.extend(cross_entropy(plain, wanted[first:last], reduction="none").tolist())
            found.after.extend(cross_entropy(other, wanted[first:last], reduction="none").tolist())
            found.same.extend((plain.argmax(-1) == other.argmax(-1)).tolist())
            found.kl.extend((plain.exp() * (plain - other)).sum(-1).clamp_(min=0).tolist())
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure: the `text`, where there is one a dialogue, and greedy continuations or not."""

    text: tuple[int, ...]
    script: Script | None = None
    greedy: bool = True


class Bench:
    """Readings with the unquantised cache, kept for as long as the subject computes with the same kernels."""

    def __init__(self, subject: Subject, wanted: Wanted) -> None:
        self._subject = subject
        self._wanted = wanted
        self._kernels = ""
        self._text: Reading | None = None
        self._script: Reading | None = None
        self._continued: list[list[int]] = []

    def cost(self, precision: PrecisionMap) -> Cost:
        """What `precision` costs on the text."""
        self._settle(precision)
        assert self._text is not None
        after = self._subject.read(self._wanted.text, precision)
        return tokenwise(self._subject, self._text, after).cost

    def turns(self, precision: PrecisionMap) -> list[Estimate]:
        """KL of each turn of the dialogue, whose cache is kept from turn to turn."""
        script = self._wanted.script
        if script is None:
            return []
        self._settle(precision)
        if self._script is None:
            self._script = self._subject.read(script.tokens, self._subject.auto)
        after = self._subject.read(script.tokens, precision)
        kl = tokenwise(self._subject, self._script, after).kl
        return [Estimate.blocked(kl[first - 1 : last - 1]) for first, last in script.turns]

    def parted(self, precision: PrecisionMap) -> Estimate | None:
        """After how many tokens greedy continuations part; None where none are wanted or the text is too short."""
        prompts = _prompts(self._wanted.text) if self._wanted.greedy else []
        if len(prompts) < 2:
            return None
        self._settle(precision)
        if not self._continued:
            self._continued = self._subject.generate(prompts, CONTINUED, self._subject.auto)
        return parted(self._continued, self._subject.generate(prompts, CONTINUED, precision))

    def _settle(self, precision: PrecisionMap) -> None:
        subject = self._subject
        subject.use(precision)
        if self._text is None or self._kernels != subject.kernels(precision):
            self._kernels = subject.kernels(precision)
            self._text = subject.read(self._wanted.text, subject.auto)
            self._script, self._continued = None, []


def measure(subject: Subject, maps: Sequence[PrecisionMap], wanted: Wanted, say: Say) -> list[dict[str, Any]]:
    """One plain object per map, in their order: `precision`, `label`, `kernels`, `token_bytes`, `capacity` (tokens for
    the same memory, 1 for unquantised), and `cost`, `turns`, `parted`; or `fault`, why the model cannot have it."""
    found: dict[int, dict[str, Any]] = {}
    bench = Bench(subject, wanted)
    able: list[tuple[str, int]] = []
    unquantised = subject.layout(subject.auto).token_bytes
    for index, precision in enumerate(maps):
        settled = subject.settle(precision)
        label = settled.spelled(subject.spec.layers)
        found[index] = {"precision": settled.plain, "label": label}
        try:
            size = subject.layout(precision).token_bytes
            able.append((subject.kernels(precision), index))
        except ValueError as error:
            found[index]["fault"] = str(error)
            continue
        found[index] |= {"kernels": able[-1][0], "token_bytes": size, "capacity": unquantised / size}
    for number, (_, index) in enumerate(sorted(able), 1):
        say(f"measuring: {found[index]['label']}, {number} of {len(able)}")
        found[index] |= _measured(bench, maps[index])
    return [found[index] for index in range(len(maps))]


def _measured(bench: Bench, precision: PrecisionMap) -> dict[str, Any]:
    turns, parts = bench.turns(precision), bench.parted(precision)
    return {
        "cost": bench.cost(precision).plain,
        "turns": [{"mean": turn.mean, "error": turn.error} for turn in turns],
        "parted": {"mean": parts.mean, "error": parts.error, "most": CONTINUED} if parts else None,
    }


def _prompts(text: Sequence[int]) -> list[tuple[int, ...]]:
    """Pieces of the text at even distances."""
    last = len(text) - PROMPT_TOKENS
    starts = sorted({index * last // (PROMPTS - 1) for index in range(PROMPTS)}) if last > 0 else []
    return [tuple(text[start : start + PROMPT_TOKENS]) for start in starts]
