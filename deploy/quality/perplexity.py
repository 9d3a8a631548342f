"""Perplexity: how well a model folder predicts a text, token by token, computed by transformers in fp32 on the CPU.

A text longer than the window is read in windows that overlap by half: each token is scored once, with at least half a
window before it (the first window's own aside). Knows no reason why two models should differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from deploy.quality.figures import Estimate as Estimate

WINDOW = 1024
"""Tokens that a model sees at once, at most."""


class PassageError(ValueError):
    """A text or a model that nothing can be measured with; the message says why."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text in token ids. `lead` is what the tokenizer puts before a text (the BOS token, or nothing): each window
    begins with it, and it is not scored."""

    tokens: tuple[int, ...]
    lead: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path, text: str) -> Passage:
        """`text` in the tokens of the model in `folder` (tokenizer.json). Raises PassageError."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise PassageError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        found = tokenizer.encode(text)
        pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
        lead = tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))
        return cls(tuple(token for token, special in pairs if not special), lead)


@dataclass(frozen=True, slots=True)
class Losses:
    """What each scored token of a passage cost: its negative log likelihood in nats, in the text's order."""

    values: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        """The mean negative log likelihood."""
        return Estimate.of(self.values)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean."""
        mean = statistics.fmean(self.values)
        return math.exp(mean) if mean < 700 else math.inf

    def above(self, other: Losses) -> Estimate:
        """How much more each token costs here than in `other`, losses of the same passage. Paired: what makes a token
        hard for both models is no part of the error."""
        return Estimate.of([mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)])


def load_model(folder: Path) -> Any:
    """The model in `folder` as transformers has it: fp32, on the CPU, plain attention (every architecture has that).

    Raises PassageError when transformers cannot load it, or would make up weights that the folder lacks.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise PassageError(f"transformers cannot load {folder}: {error}") from error
    faults = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if faults:
        raise PassageError(f"the weights in {folder} do not fit its config.json: {faults[0]}")
    return model.eval()


def losses(model: Any, passage: Passage, *, window: int = WINDOW) -> Losses:
    """What `model` (a causal model of transformers) makes of `passage`, `window` tokens at once with the lead.

    Without a lead the first token has nothing before it and is not scored. Raises PassageError for a passage of fewer
    than 2 scored tokens, for token ids that the model lacks, for a window that the lead fills.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or window
    room = min(window, limit) - len(passage.lead)
    first = 0 if passage.lead else 1
    if room < 2:
        raise PassageError(
            f"a window of {min(window, limit)} tokens has no room beside {len(passage.lead)} of the lead"
        )
    if len(passage.tokens) < first + 2:
        raise PassageError(f"the text has {len(passage.tokens)} tokens: too short to measure anything")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if max((*passage.tokens, *passage.lead)) >= vocabulary:
        raise PassageError(f"tokenizer.json gives ids beyond the model's {vocabulary} tokens: of another model?")
    found: list[float] = []
    for span in _spans(len(passage.tokens), room, first):
        found += _scored(model, passage, span)
    return Losses(tuple(found))


def losses_of(folder: Path, passage: Passage, *, window: int = WINDOW) -> Losses:
    """`losses` of the model in `folder`, which is loaded for it."""
    return losses(load_model(folder), passage, window=window)


@dataclass(frozen=True, slots=True)
class _Span:
    """A window: tokens [start, stop), of which those from `scored` on are new."""

    start: int
    scored: int
    stop: int


def _spans(count: int, room: int, first: int) -> Iterator[_Span]:
    """Windows of up to `room` tokens that score [first, count), each token once."""
    start, scored = 0, first
    while scored < count:
        stop = min(start + room, count)
        yield _Span(start, scored, stop)
        start, scored = stop - room // 2, stop


def _scored(model: Any, passage: Passage, span: _Span) -> list[float]:
    ids = torch.tensor([(*passage.lead, *passage.tokens[span.start : span.stop])])
    new = span.stop - span.scored
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, -new - 1 : -1]
        return cross_entropy(logits.float(), ids[0, -new:], reduction="none").tolist()
