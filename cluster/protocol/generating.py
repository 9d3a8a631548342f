"""The two routes that generate: a request's body to an answer, whole or as a stream.

Knows FastAPI's request and response; what an answer costs, and where it is made, is the Completer's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from cluster.errors import ApiError
from cluster.generation import Completer
from cluster.protocol import body
from cluster.protocol.answers import ChatChunks, ChatCompletion, Chunks, Completion
from cluster.protocol.api import MAX_SESSION_CHARS, ChatRequest, CompletionRequest, Sampled
from cluster.protocol.choice import Choice, collected, merged
from cluster.protocol.connection import Connection
from cluster.protocol.fields import CHAT, COMPLETION, Neutral, refuse_in_messages, refuse_unserved
from cluster.protocol.intake import Intake
from cluster.protocol.streams import EventStream

LONG_BODY = 64 * 1024
"""Bytes; a longer body is parsed in a thread."""

Asked = TypeVar("Asked", bound=Sampled)
Whole = Callable[[Sequence[Choice], Sequence[str], Sequence[str], str, int], BaseModel]


class Generating:
    """Handlers of POST /v1/completions and POST /v1/chat/completions."""

    def __init__(self, completer: Completer, intake: Intake, body_limit: int) -> None:
        self._completer = completer
        self._intake = intake
        self._body_limit = body_limit

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts. Fields that would change the text and are not served are refused by name;
        unknown fields are ignored."""
        asked = await self._read(request, CompletionRequest, COMPLETION)
        choices = await self._intake.completion(asked, _session(request))
        return await self._answer(request, asked, choices, Chunks, Completion.of)

    async def chat(self, request: Request) -> Response:
        """Answer a chat through the model's own template. Fields that would change the text and are not served are
        refused by name; unknown fields are ignored."""
        asked = await self._read(request, ChatRequest, CHAT)
        choices = await self._intake.chat(asked, _session(request))
        return await self._answer(request, asked, choices, ChatChunks, ChatCompletion.of)

    async def _read(self, request: Request, model: type[Asked], table: dict[str, Neutral]) -> Asked:
        body.check_type(request.headers.get("content-type", ""))
        try:
            raw = await body.read(request.headers, request.stream(), self._body_limit)
        except ClientDisconnect:
            raise ApiError("The client left before it had sent the whole body.", "client_closed") from None
        return await self._intake.off_loop(len(raw) > LONG_BODY, _parsed, raw, model, table)

    async def _answer(
        self, request: Request, asked: Sampled, choices: list[Choice], chunks: type[Chunks], whole: Whole
    ) -> Response:
        """Whatever is refused before the first token is an ApiError, stream or not."""
        id, created = choices[0].generation.id.rpartition("-")[0], int(time.time())
        async with AsyncExitStack() as owned:
            deltas = merged(self._completer, choices)
            owned.push_async_callback(deltas.aclose)
            connection = Connection(request.receive)
            owned.callback(connection.close)
            if not asked.stream:
                texts, reasons = await connection.run(collected(deltas, choices))
                return _json(whole(choices, texts, reasons, id, created))
            first = await connection.run(anext(deltas))
            usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            written = chunks(id, created, asked.model, usage)
            return EventStream(first, deltas, choices, written, connection, owned.pop_all())


def _parsed(raw: bytes, model: type[Asked], table: dict[str, Neutral]) -> Asked:
    value = body.parse(raw)
    refuse_unserved(value, table)
    refuse_in_messages(value)
    return body.check(model, value)


def _session(request: Request) -> str | None:
    """The session that the client names in `x-session-id`; it goes before `prompt_cache_key`."""
    session = request.headers.get("x-session-id")
    if session and len(session) > MAX_SESSION_CHARS:
        message = f"The header x-session-id has {len(session)} characters; at most {MAX_SESSION_CHARS} are taken."
        raise ApiError(message, "invalid_value", "x-session-id")
    return session or None


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
