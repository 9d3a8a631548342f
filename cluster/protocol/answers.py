"""OpenAI's answers as we give them: what the OpenAPI page says of a body, and the chunks of a stream.

Chunks are ASCII (other characters as JSON escapes): a client that decodes them in the wrong character set, or splits
lines at U+2028, still reads them whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel

from cluster.protocol.choice import Choice, Whole
from cluster.protocol.logprobs import ChatLogprobs, CompletionLogprobs, Stretch, chat_logprobs, completion_logprobs
from cluster.text.spelling import Spelling

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Reason(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"


class CachedTokens(BaseModel):
    """Prompt tokens whose keys and values came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of the whole request, all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Usage:
        """What these choices have used so far."""
        prompt = sum(len(choice.generation.prompt) for choice in choices)
        output = sum(choice.output_tokens for choice in choices)
        cached = CachedTokens(cached_tokens=sum(choice.cached for choice in choices))
        return cls(
            prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output, prompt_tokens_details=cached
        )


class CompletionChoice(BaseModel):
    """The answer to one prompt."""

    index: int
    text: str
    finish_reason: Reason | None
    logprobs: CompletionLogprobs | None = None


class Completion(BaseModel):
    """The answer to a completion; also a stream's chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None

    @classmethod
    def of(cls, choices: Sequence[Choice], wholes: Sequence[Whole], id: str, created: int) -> Completion:
        """The whole answer."""
        made = [
            CompletionChoice(
                index=choice.index,
                text=whole.text,
                finish_reason=Reason(whole.reason),
                logprobs=completion_logprobs(whole.told, choice.spelling) if choice.tells else None,
            )
            for choice, whole in zip(choices, wholes, strict=True)
        ]
        return cls(id=id, created=created, model=choices[0].model, choices=made, usage=Usage.of(choices))


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The answer to a chat."""

    index: int
    message: AssistantMessage
    finish_reason: Reason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(BaseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage

    @classmethod
    def of(cls, choices: Sequence[Choice], wholes: Sequence[Whole], id: str, created: int) -> ChatCompletion:
        """The whole answer."""
        made = [
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=whole.text),
                finish_reason=Reason(whole.reason),
                logprobs=chat_logprobs(whole.told, choice.spelling) if choice.tells else None,
            )
            for choice, whole in zip(choices, wholes, strict=True)
        ]
        return cls(id=id, created=created, model=choices[0].model, choices=made, usage=Usage.of(choices))


class ChatDelta(BaseModel):
    """What a chunk adds to the model's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A chunk's only choice."""

    index: int
    delta: ChatDelta
    finish_reason: Reason | None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Chunks:
    """Writes the server-sent events of one stream. `usage`: whether the client asked for it (then it is null until the
    last chunk, as OpenAI has it).

    What all chunks of a stream have in common is encoded once, and a text chunk is put together by hand: there is one
    for each token."""

    kind = "text_completion"

    def __init__(self, id: str, created: int, model: str, usage: bool) -> None:
        self._head = {"id": id, "object": self.kind, "created": created, "model": model}
        self._usage = usage
        self._open = f'data: {_encode(self._head)[:-1]},"choices":['
        self._close = "]" + (',"usage":null' if usage else "") + "}\n\n"

    def start(self, index: int) -> bytes:
        """What precedes a choice's text."""
        return b""

    def text(self, index: int, text: str, logprobs: str = "null") -> bytes:
        """More text of a choice; `logprobs` is JSON."""
        return self._written(f'{{"index":{index},"text":{_encode(text)},"logprobs":{logprobs},"finish_reason":null}}')

    def logprobs(self, told: Sequence[Stretch], spelling: Spelling) -> str:
        """Those of a text's tokens, as `text` takes them."""
        return _encode(completion_logprobs(told, spelling).model_dump())

    def finish(self, index: int, reason: str) -> bytes:
        """A choice's last chunk."""
        return self._choice({"index": index, "text": "", "logprobs": None, "finish_reason": reason})

    def end(self, choices: Sequence[Choice]) -> bytes:
        """The stream's last events: the usage, if asked for, and the end mark."""
        if not self._usage:
            return DONE
        return event(self._head | {"choices": [], "usage": Usage.of(choices).model_dump()}) + DONE

    def _choice(self, choice: dict[str, Any]) -> bytes:
        return self._written(_encode(choice))

    def _written(self, choice: str) -> bytes:
        return f"{self._open}{choice}{self._close}".encode()


class ChatChunks(Chunks):
    """The same for a chat: the role comes first."""

    kind = "chat.completion.chunk"

    def start(self, index: int) -> bytes:
        """The chunk that opens the assistant's turn."""
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def text(self, index: int, text: str, logprobs: str = "null") -> bytes:
        """More text of a choice; `logprobs` is JSON."""
        delta = f'{{"content":{_encode(text)}}}'
        return self._written(f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}')

    def logprobs(self, told: Sequence[Stretch], spelling: Spelling) -> str:
        """Those of a text's tokens, as `text` takes them."""
        return _encode(chat_logprobs(told, spelling).model_dump())

    def finish(self, index: int, reason: str) -> bytes:
        """A choice's last chunk."""
        return self._delta(index, {}, reason)

    def _delta(self, index: int, delta: dict[str, str], reason: str | None) -> bytes:
        return self._choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data).encode() + b"\n\n"


def waiting(ahead: int | None) -> bytes:
    """A comment among the events, which clients skip (WHATWG HTML, section 9.2.6). `ahead`: how many stand before it in
    the line, where it stands in one."""
    return b": waiting\n\n" if ahead is None else b": waiting, %d ahead\n\n" % ahead
