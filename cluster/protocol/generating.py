"""The two routes that generate: a request's body to an answer, whole or as a stream.

Knows FastAPI's request and response; what an answer costs, and where it is made, is the Completer's matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from fastapi import Request, Response
from pydantic import BaseModel

from cluster.generation import Completer
from cluster.protocol.answers import ChatChunks, ChatCompletion, Chunks, Completion
from cluster.protocol.api import ChatRequest, CompletionRequest, Sampled
from cluster.protocol.choice import Choice, Delta, Whole, collected, merged
from cluster.protocol.connection import Connection
from cluster.protocol.fields import CHAT, COMPLETION
from cluster.protocol.intake import Intake
from cluster.protocol.reader import Reader
from cluster.protocol.streams import EventStream

Answered = Callable[[Sequence[Choice], Sequence[Whole], str, int], BaseModel]
LONG_ANSWER = 2_000
"""Tokens with log-probabilities that are written on the event loop: some ten milliseconds. More go to a thread."""


class Generating:
    """Handlers of POST /v1/completions and POST /v1/chat/completions. A stream that has nothing to send for `comment_s`
    sends a comment, so that nothing on the way takes it for dead."""

    def __init__(self, completer: Completer, intake: Intake, reader: Reader, comment_s: float) -> None:
        self._completer = completer
        self._intake = intake
        self._reader = reader
        self._comment_s = comment_s

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts. Fields that would change the text and are not served are refused by name;
        unknown fields are ignored."""
        asked, caller = await self._reader.read(request, CompletionRequest, lambda _: COMPLETION)
        choices = await self._intake.completion(asked, caller)
        return await self._answer(request, asked, choices, Chunks, Completion.of)

    async def chat(self, request: Request) -> Response:
        """Answer a chat through the model's own template. Fields that would change the text and are not served are
        refused by name; unknown fields are ignored."""
        asked, caller = await self._reader.read(request, ChatRequest, lambda _: CHAT)
        choices = await self._intake.chat(asked, caller)
        return await self._answer(request, asked, choices, ChatChunks, ChatCompletion.of)

    async def _answer(
        self, request: Request, asked: Sampled, choices: list[Choice], chunks: type[Chunks], answered: Answered
    ) -> Response:
        """Whatever is refused before the first token, and before a stream has to say that it waits, is an ApiError."""
        id, created = choices[0].generation.id.rpartition("-")[0], int(time.time())
        async with AsyncExitStack() as owned:
            deltas = merged(self._completer, choices)
            owned.push_async_callback(deltas.aclose)
            connection = Connection(request.receive)
            owned.callback(connection.close)
            if not asked.stream:
                wholes = await connection.run(collected(deltas, choices))
                told = sum(len(stretch.tokens) for whole in wholes for stretch in whole.told)
                return await self._intake.off_loop(
                    told > LONG_ANSWER, lambda: _json(answered(choices, wholes, id, created))
                )
            first = asyncio.ensure_future(anext(deltas))
            owned.push_async_callback(_ended, first)
            await connection.run(asyncio.wait((first,), timeout=self._comment_s))
            if first.done():
                first.result()
            usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            written = chunks(id, created, asked.model, usage)
            ahead = self._completer.ahead
            return EventStream(first, deltas, choices, written, connection, self._comment_s, ahead, owned.pop_all())


async def _ended(first: asyncio.Future[Delta]) -> None:
    """Nobody waits for it any more: only then can the generator behind it be closed."""
    first.cancel()
    await asyncio.wait((first,))
    if not first.cancelled():
        first.exception()  # seen


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
