"""Log-probabilities in an answer: joined with the tokens' texts as these are shown, and written as OpenAI writes them.

Values and JSON; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from cluster.text.spelling import Spelled, Spelling
from cluster.text.tokenizer import Transcript
from workers.logprobs import Logprobs, TokenLogprobs, follow

MIN_LOGPROB = -9999.0
"""Written for what is even less likely, as OpenAI does."""


class CompletionLogprobs(BaseModel):
    """Of a completion, one entry per token, those of the prompt too with `echo`. `tokens` are what each adds to the
    text ("" for a part of a character, the next ones complete it, and for a token that ends the text); `text_offset`
    counts characters. The first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a place. `bytes` is null for a control token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """One token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a chat's answer, one entry per token; a token that ends the answer has one too."""

    content: list[ChatTokenLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that follow each other in an answer, what each adds to the text, which has `offset` characters before
    them. `opens`: the first is a prompt's first, of which `logprobs` know nothing."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    offset: int
    logprobs: Logprobs
    opens: bool = False

    def __iter__(self) -> Iterator[tuple[int, str, int, TokenLogprobs | None]]:
        """Token, text, offset, log-probabilities."""
        known: Iterator[TokenLogprobs | None] = iter(self.logprobs)
        offset = self.offset
        for index, (token, text) in enumerate(zip(self.tokens, self.texts, strict=True)):
            yield token, text, offset, None if self.opens and not index else next(known)
            offset += len(text)


class Trail:
    """What of one choice's tokens is to be told with the text that shows them. `transcript` is traced."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._tokens: list[int] = []
        self._logprobs: Logprobs | None = None
        self._told = 0
        self._offset = 0
        self._shown = 0

    def echo(self, prompt: Sequence[int], logprobs: Logprobs | None, text: str) -> Stretch | None:
        """The prompt's tokens, all of which `text` shows; None when nothing is to be told of them."""
        pieces = self._transcript.pieces
        self._told = len(prompt)
        self._offset = self._shown = len(text)
        if logprobs is None:
            return None
        return Stretch(tuple(prompt), tuple(pieces[: len(prompt)]), 0, logprobs, opens=True)

    def add(self, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Tokens that were generated; the transcript may end the text before the last of them."""
        self._tokens += tokens
        self._logprobs = follow(self._logprobs, logprobs)

    def show(self, characters: int, ended: bool) -> Stretch | None:
        """So many characters more are shown: the tokens that are now. When it has `ended`, all that are left, and what
        of their texts is not shown is cut off."""
        self._shown += characters
        texts: list[str] = []
        offset = self._offset
        for piece in self._transcript.pieces[self._told :]:
            if not ended and self._offset + len(piece) > self._shown:
                break
            texts.append(piece[: self._shown - self._offset])
            self._offset += len(texts[-1])
        count = len(texts)
        if not count or self._logprobs is None:
            return None
        tokens, logprobs = tuple(self._tokens[:count]), self._logprobs.until(count)
        del self._tokens[:count]
        self._logprobs = self._logprobs.since(count)
        self._told += count
        return Stretch(tokens, tuple(texts), offset, logprobs)


def completion_logprobs(stretches: Sequence[Stretch], spelling: Spelling) -> CompletionLogprobs:
    """A completion's, or those of one of its chunks."""
    told = [entry for stretch in stretches for entry in stretch]
    return CompletionLogprobs(
        tokens=[text for _, text, _, _ in told],
        token_logprobs=[None if known is None else _floored(known.logprob) for _, _, _, known in told],
        top_logprobs=[None if known is None else _likeliest(token, known, spelling) for token, _, _, known in told],
        text_offset=[offset for _, _, offset, _ in told],
    )


def chat_logprobs(stretches: Sequence[Stretch], spelling: Spelling) -> ChatLogprobs:
    """A chat's, or those of one of its chunks."""
    content = []
    for stretch in stretches:
        for token, _, _, known in stretch:
            assert known is not None, "a chat echoes no prompt"
            tops = [_top(spelling.of(id), value) for id, value in known.top]
            own = _top(spelling.of(token), known.logprob)
            content.append(ChatTokenLogprob(**own.model_dump(), top_logprobs=tops))
    return ChatLogprobs(content=content)


def _likeliest(token: int, known: TokenLogprobs, spelling: Spelling) -> dict[str, float]:
    """By name; the token itself always among them. Of two that are spelled alike, the likelier."""
    found: dict[str, float] = {}
    for id, value in (*known.top, (token, known.logprob)):
        spelled = spelling.of(id)
        found.setdefault(spelled.name if spelled.whole else f"bytes:{spelled.name}", _floored(value))
    return found


def _top(spelled: Spelled, value: float) -> TopLogprob:
    data = None if spelled.data is None else list(spelled.data)
    return TopLogprob(token=spelled.name, logprob=_floored(value), bytes=data)


def _floored(value: float) -> float:
    return max(value, MIN_LOGPROB)
