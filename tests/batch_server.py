"""A small server for batches: it counts words, answers with what it was asked about, and has whatever trouble a test
wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fake_server import FakeServer

CONTEXT = 200


def question(body: dict[str, Any]) -> str:
    """What a request asks."""
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


def about(body: dict[str, Any]) -> str:
    """The first words of the text that a request asks about."""
    return " ".join(question(body).partition("Text:\n")[2].split()[:4])


@dataclass
class Trouble:
    """What becomes of a request instead of an answer: a status with headers and an error's code; or "cut", in the
    middle of the stream; or "hang up", before anything."""

    status: int = 0
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "status"


@dataclass
class BatchServer(FakeServer):
    """`troubles` is asked about every request that generates: (number from 0, body) -> its trouble or None. `tiers`,
    `classes`, `timeouts`: what they asked for. `context` None: the server does not say. `most`: tokens beyond which a
    request is refused as too long. `longest`: the most characters whose tokens were asked for. A token is a word."""

    troubles: Callable[[int, dict[str, Any]], Trouble | None] = lambda number, body: None
    tiers: list[str | None] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)
    timeouts: list[str | None] = field(default_factory=list)
    counted: int = 0
    longest: int = 0
    context: int | None = CONTEXT
    most: int = 10**9
    counts: bool = True
    reply: Callable[[dict[str, Any]], Sequence[str]] = lambda body: (f"about {about(body)}", ".")

    async def _models(self, _: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": "stand-in"}
        if self.context is not None:
            model["max_model_len"] = self.context
        return web.json_response({"object": "list", "data": [model, {"id": "second", "max_model_len": 999}]})

    def _routes(self, app: web.Application) -> None:
        if self.counts:
            app.router.add_post("/tokenize", self._tokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.counted += 1
        prompts = [body["messages"][0]["content"]] if "messages" in body else body["prompt"]
        self.longest = max(self.longest, sum(map(len, prompts)))
        counts = [len(prompt.split()) + 3 * ("messages" in body) for prompt in prompts]
        return web.json_response({"count": sum(counts), "counts": counts, "max_model_len": self.context})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.tiers.append(body.get("service_tier"))
        self.classes.append(request.headers.get("x-priority-class"))
        self.timeouts.append(request.headers.get("x-request-timeout"))
        trouble = self.troubles(len(self.asked), body)
        tokens = len(question(body).split()) + body["max_tokens"]
        if trouble is None and tokens > min(self.most, self.context or self.most):
            trouble = Trouble(400, "context_length_exceeded")
        if trouble is None:
            return await super()._generate(request) if body.get("stream") else await self._whole(request, body)
        self.asked.append(body)
        if trouble.kind == "status":
            error = {"message": f"trouble {trouble.code}", "type": "x", "code": trouble.code}
            return web.json_response({"error": error}, status=trouble.status, headers=trouble.headers)
        assert request.transport is not None
        if trouble.kind == "cut":
            response = web.StreamResponse()
            await response.prepare(request)
            await self._send(response, {"choices": [{"delta": {"content": "half"}}]})
        request.transport.abort()
        return web.Response()

    async def _whole(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.asked.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        await asyncio.sleep(self.pause_s)
        usage = {"prompt_tokens": 10, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 3}}
        message = {"role": "assistant", "content": "".join(self.reply(body))}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {"id": "x", "object": "chat.completion", "choices": choices, "usage": usage}
        return web.json_response(answer, headers={"x-request-id": f"r{len(self.asked)}"})
