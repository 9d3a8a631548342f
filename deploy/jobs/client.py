"""Server: one request of a batch to a server that speaks OpenAI's protocol, and what its answer means for the batch.

Knows neither documents nor retries: an answer is returned, everything else is one of four exceptions, by what it asks
of the caller.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from cluster.errors import STATUS
from deploy.bench.client import ServerError, authorization

BUSY = (429, 503)
"""The server has no room now."""
_LATE = (408, 504)
_AWAY = (500, 502, 520, 521, 522, 524)
"""It, or what stands before it, has failed; another try may well succeed."""
_HOPELESS = (401, 403)
"""No request of this batch will ever be answered otherwise."""
_MARGIN_S = 30.0
BATCH = {"service_tier": "flex"}
"""The batch class, as OpenAI's protocol says it; a header says it too. Every server knows, or ignores, these."""


class Busy(Exception):
    """No room now; `retry_after` in seconds where the server said it."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Away(Exception):
    """The server cannot be reached, went away, or failed; `answered`: it was there to say so."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Refused(Exception):
    """This request will never be answered; `body` is the server's whole answer."""

    def __init__(self, status: int, code: str, message: str, body: object = None, request_id: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.body, self.request_id = status, code, message, body, request_id


@dataclass(frozen=True, slots=True)
class Answer:
    """A text and its usage as the server told it; `waited`: it stood in the line so long that the server said so."""

    text: str
    usage: Mapping[str, Any] | None
    finish: str | None
    waited: bool


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer as it came."""

    status: int
    request_id: str
    body: Any


@dataclass(frozen=True, slots=True)
class Server:
    """The server at `url` (without trailing slash and /v1), asked for `model`, as `session`, with an API `key`;
    a request may take `timeout_s`, which the server is told."""

    http: aiohttp.ClientSession
    url: str
    model: str
    session: str
    key: str | None = None
    timeout_s: float = 3600.0

    async def introduction(self) -> tuple[str, int | None]:
        """(name, context in tokens) of `model`, or of the first that is served; None where the context is not told.
        Raises as `ask`."""
        async with self._requested("GET", "/v1/models") as response:
            if response.status != 200:
                raise await _failure(response)
            rows = (await _object(response)).get("data")
        models = [row for row in rows if isinstance(row, dict) and row.get("id")] if isinstance(rows, list) else []
        wanted = [row for row in models if self.model in ("", row["id"])]
        if not wanted:
            names = ", ".join(str(row["id"]) for row in models) or "none"
            raise ServerError(f"{self.url} does not serve {self.model or 'any model'}; its models: {names}")
        longest = wanted[0].get("max_model_len")
        return str(wanted[0]["id"]), longest if isinstance(longest, int) else None

    async def ask(self, prompt: str, max_tokens: int, *, chat: bool, temperature: float = 0.0) -> Answer:
        """The answer to one prompt, of the batch class. Streamed, so that nothing on the way takes a long wait for a
        dead connection. Raises Busy, Away, Refused, ServerError."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **BATCH}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        async with self._requested("POST", "/v1/chat/completions" if chat else "/v1/completions", body) as response:
            if response.status != 200:
                raise await _failure(response)
            return await _streamed(response)

    async def send(self, path: str, body: Mapping[str, Any]) -> Whole:
        """The answer to a request as it stands; it is of the batch class unless it says otherwise. Raises as `ask`."""
        async with self._requested("POST", path, {**BATCH, **body}) as response:
            if response.status != 200:
                raise await _failure(response)
            return Whole(response.status, response.headers.get("x-request-id", ""), await _object(response))

    async def count(self, body: Mapping[str, object]) -> list[int]:
        """The tokens of each prompt. Raises as `ask`; Refused with status 404 where the server does not count."""
        async with self._requested("POST", "/tokenize", {"model": self.model, **body}) as response:
            if response.status != 200:
                raise await _failure(response)
            answer = await _object(response)
            counts = answer.get("counts", [answer.get("count")])
            if not isinstance(counts, list) or not all(isinstance(one, int) for one in counts):
                raise ServerError(f"{self.url}/tokenize answers without counts")
            return counts

    @asynccontextmanager
    async def _requested(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = authorization(self.key) | {"x-priority-class": "batch", "x-request-timeout": f"{self.timeout_s:g}"}
        headers |= {"x-session-id": self.session} if self.session else {}
        limit = aiohttp.ClientTimeout(total=self.timeout_s + _MARGIN_S, sock_connect=_MARGIN_S)
        try:
            async with self.http.request(
                method, self.url + path, json=body, headers=headers, timeout=limit
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise Away(f"{self.url}: {str(error) or type(error).__name__}") from error


def meaning(
    status: int, code: str, message: str, retry_after: float | None, body: object = None, request_id: str = ""
) -> Exception:
    """What an answer other than 200 asks of the caller: to come back later (Busy), to try again (Away), to leave this
    request (Refused), to end (ServerError)."""
    if status in BUSY:
        return Busy(message, retry_after)
    if status in _LATE:
        return Busy(f"{code or status}: {message}", retry_after)
    if code == "poisoned_request":
        return Refused(status, code, message, body, request_id)
    if status in _AWAY:
        return Away(f"{status} {message}", answered=True)
    if status in _HOPELESS or (status == 404 and code == "model_not_found"):
        return ServerError(f"{status}: {message}")
    return Refused(status, code or f"http_{status}", message, body, request_id)


async def _failure(response: aiohttp.ClientResponse) -> Exception:
    raw = (await response.content.read(2**20)).decode("utf-8", "replace")
    try:
        body: object = json.loads(raw)
    except ValueError:
        body = raw[:2000]
    code, message = _told(body)
    message = message or raw[:300] or response.reason or str(response.status)
    request_id = response.headers.get("x-request-id", "")
    return meaning(response.status, code, message, _retry_after(response.headers.get("retry-after")), body, request_id)


def _told(body: object) -> tuple[str, str]:
    """(code, message) of an error in OpenAI's shape, "" each where there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")


def _retry_after(value: str | None) -> float | None:
    """Seconds; a date, which the header may also be, counts as not said: clocks differ."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return min(seconds, 600.0) if seconds >= 0 else None


async def _object(response: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        value = json.loads(await response.read())
    except ValueError as error:
        raise Away(f"an answer that is no JSON: {error}", answered=True) from error
    if not isinstance(value, dict):
        raise Away("an answer that is no object", answered=True)
    return value


async def _streamed(response: aiohttp.ClientResponse) -> Answer:
    """A stream's text. One that ends without its end mark was cut: half an answer is none."""
    pieces: list[str] = []
    usage, finish, waited = None, None, False
    async for line in response.content:
        waited = waited or line.startswith(b": waiting")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return Answer("".join(pieces), usage, finish, waited)
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise Away("an event that is no JSON", answered=True) from error
        if chunk.get("error"):
            raise _in_stream(chunk)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
            finish = choice.get("finish_reason") or finish
    raise Away("the stream ended in the middle of the answer")


def _in_stream(chunk: object) -> Exception:
    """An error that came after the 200; its code stands for the status that it had no place for."""
    code, message = _told(chunk)
    status, _ = STATUS.get(code, (500, ""))
    return meaning(status, code, message or "the server failed", None)
