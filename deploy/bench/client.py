"""One streamed request to an OpenAI-compatible server, timed. Knows nothing of loads or statistics."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from deploy.bench.prompts import Message, Step


@dataclass(slots=True)
class Sample:
    """What one request gave. Times in seconds: `ttft` from sending to the first text, `decode` from there to the last
    chunk, `total` to the end, `gaps` between chunks with text. `error` is None when the stream ended as it should."""

    ttft: float | None = None
    total: float = 0.0
    decode: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens or no text."""
        return self.decode / (self.output_tokens - 1) if self.ttft is not None and self.output_tokens > 1 else None


class ServerError(Exception):
    """The server answered with an error, or its stream broke the protocol."""


@dataclass(frozen=True, slots=True)
class Client:
    """Requests to one server. `session` is an open aiohttp session, `url` has no trailing slash or /v1. `key` is an API
    key, `fields` go into every body."""

    session: aiohttp.ClientSession
    url: str
    model: str
    max_tokens: int
    ignore_eos: bool = True
    key: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    async def ask(self, step: Step, history: Sequence[Message] = (), session: str | None = None) -> Sample:
        """Send `step` (a chat step behind `history`) and read its stream. Never raises for what a server can do wrong:
        that becomes `Sample.error`."""
        sample, sent = Sample(), time.perf_counter()
        try:
            await self._read(step, history, session, sample, sent)
        except (ServerError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            sample.error = str(error) or type(error).__name__
        sample.total = time.perf_counter() - sent
        return sample

    def _request(self, step: Step, history: Sequence[Message]) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": step.max_tokens or self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if step.prompt is not None:
            return f"{self.url}/v1/completions", {**body, "prompt": step.prompt}
        return f"{self.url}/v1/chat/completions", {**body, "messages": [*history, *step.messages]}

    async def _read(
        self, step: Step, history: Sequence[Message], session: str | None, sample: Sample, sent: float
    ) -> None:
        address, body = self._request(step, history)
        headers = authorization(self.key) | ({"x-session-id": session} if session else {})
        pieces: list[str] = []
        last_text = last = sent
        async with self.session.post(address, json=body, headers=headers) as response:
            if response.status != 200:
                raise ServerError(f"{response.status} {(await response.text())[:300]}")
            async for chunk in events(response):
                _note_usage(sample, chunk.get("usage"))
                if not chunk.get("choices"):
                    continue
                last = time.perf_counter()
                text = _text(chunk["choices"][0])
                if not text:
                    continue
                pieces.append(text)
                if sample.ttft is None:
                    sample.ttft = last - sent
                else:
                    sample.gaps.append(last - last_text)
                last_text = last
        sample.reply = "".join(pieces)
        sample.output_tokens = sample.output_tokens or len(pieces)
        sample.decode = last - sent - sample.ttft if sample.ttft is not None else 0.0


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]. Raises ServerError for an error event or a stream cut short."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ServerError(f"an event that is no object: {data[:100]!r}")
        if chunk.get("error"):
            raise ServerError(f"error in the stream: {json.dumps(chunk['error'])[:300]}")
        yield chunk
    raise ServerError("the stream ended without [DONE]")


def _text(choice: dict[str, Any]) -> str:
    """The new text of a completion's or a chat's chunk."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _note_usage(sample: Sample, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    sample.output_tokens = usage.get("completion_tokens") or 0
    sample.prompt_tokens = usage.get("prompt_tokens") or 0
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries an API key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def first_model(session: aiohttp.ClientSession, url: str, key: str | None = None) -> str:
    """The first model that `url` serves. Raises ServerError saying what is wrong with the server."""
    try:
        async with session.get(f"{url}/v1/models", headers=authorization(key)) as response:
            if response.status == 401:
                raise ServerError(f"{url} wants an API key (--key-file)")
            models = (await response.json())["data"] if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        reason = str(error) or repr(error)
        raise ServerError(f"{url} does not answer like an OpenAI server: {reason}") from error
    if not models:
        raise ServerError(f"{url}/v1/models names no model; is the server ready? (or pass --model)")
    return str(models[0]["id"])
