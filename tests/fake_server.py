"""A small server that streams like OpenAI's, and misbehaves on request: what benchmarks and questions are tested on.

As a program: `python tests/fake_server.py PORT [TROUBLE]`, until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKENS = ("a", "b", "c", "d")


@dataclass
class FakeServer:
    """`trouble` is None, "status", "error event", "cut", "no usage" or "never well"; `pause_s` lies between chunks;
    `asked` are the bodies, `sessions` the x-session-id headers, `at_once` the most requests that were running together;
    `port` 0 takes any that is free; `reply` makes the pieces of an answer from the body that asks."""

    trouble: str | None = None
    pause_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    running: int = 0
    at_once: int = 0
    port: int = 0
    reply: Callable[[dict[str, Any]], Sequence[str]] = lambda body: TOKENS
    url: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._routes(app)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def _routes(self, app: web.Application) -> None:
        """Further routes, for whoever extends this server."""

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stand-in"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.trouble == "never well" else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        kinds = ("completion", "chat")
        asked = [sum(("messages" in body) == (kind == "chat") for body in self.asked) for kind in kinds]
        lines = (f'asked_total{{kind="{kind}"}} {count}.0' for kind, count in zip(kinds, asked, strict=True))
        return web.Response(text="# HELP asked_total of each kind\n" + "\n".join(lines) + "\n")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        if self.trouble == "status":
            return web.json_response({"error": {"message": "full", "type": "overloaded", "code": "full"}}, status=503)
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        for text in self.reply(body):
            await asyncio.sleep(self.pause_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            await self._send(response, {"choices": [choice]})
        if self.trouble == "cut":
            return response
        if self.trouble == "error event":
            await self._send(response, {"error": {"message": "group died"}})
            return response
        if self.trouble != "no usage":
            usage = {"prompt_tokens": 10, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 3}}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def main() -> None:
    """Serve on the port of the command line."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    port, *trouble = sys.argv[1:]
    if trouble == ["ends"]:
        sys.exit("no such model: x")
    with FakeServer(port=int(port), trouble=trouble[0] if trouble else None):
        ended.wait()


if __name__ == "__main__":
    main()
