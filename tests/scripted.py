"""An ingress without a cluster: a tiny tokenizer made here, a Completer that follows a script, an ASGI client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import httpx
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers, trainers

from cluster.coordination.cards import SessionCopy
from cluster.errors import ApiError
from cluster.generation import Generation, GroupHealth, Health, ModelCard
from cluster.protocol.routes import build_app
from cluster.protocol.served import ServedModel
from cluster.text.template import ChatTemplate
from cluster.text.tokenizer import Tokenizer
from workers.plan import Finish, TokenEvent

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
CORPUS = ["the quick brown fox jumps over the lazy dog, then the dog sleeps. Über naïve 日本語 🙂🙃 12 34"] * 4


def byte_level(vocabulary: int = 320) -> tokenizers.Tokenizer:
    """A byte-level BPE with some merges, ids 0-2 special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def tiny(template: str | None = CHATML, bos: str | None = None) -> Tokenizer:
    return Tokenizer(byte_level(), ChatTemplate(template, {}) if template is not None else None, bos)


TINY = tiny()
END = TINY.vocabulary.special_texts["<|im_end|>"]


def ids(text: str) -> tuple[int, ...]:
    """The tiny tokenizer's tokens of an answer's text."""
    return TINY.encode(text, 10**9)


Step = TokenEvent | Exception | Callable[[], Any]
Script = Callable[[Generation], Iterable[Step]]


def says(text: str, finish: Finish = Finish.STOP, *, cached: int = 0, by: int = 1) -> Script:
    """A script: the text's tokens, `by` per event, then the end token where the model stops by itself."""

    def script(generation: Generation) -> Iterable[Step]:
        tokens = ids(text) + ((END,) if finish is Finish.STOP else ())
        for index in range(0, len(tokens), by):
            last = index + by >= len(tokens)
            part = tokens[index : index + by]
            yield TokenEvent(generation.id, 0, index, part, finish if last else None, cached)

    return script


class Scripted:
    """A Completer. `seen` are the generations asked for, `closed` those left before their end, `finished` the rest.
    `copies` are what it has of each (tenant, session), an ApiError instead is raised; `place` is that in the line."""

    def __init__(self, script: Script, health: Health | None = None) -> None:
        self.script = script
        self.state = health or Health(True, "", (GroupHealth("g0", True),))
        self.seen: list[Generation] = []
        self.closed: list[str] = []
        self.finished: list[str] = []
        self.satisfied: list[str] = []
        self.copies: dict[tuple[str, str], tuple[SessionCopy, ...] | ApiError] = {}
        self.place: int | None = None

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenEvent, None]:
        self.seen.append(generation)
        whole = False
        try:
            for step in self.script(generation):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenEvent):
                    whole = step.finish is not None
                    yield step
                else:
                    await step()
            whole = True
        finally:
            (self.finished if whole else self.closed).append(generation.id)

    def satisfy(self, id: str) -> None:
        self.satisfied.append(id)

    def ahead(self, id: str) -> int | None:
        return self.place

    async def health(self) -> Health:
        return self.state

    async def session(self, tenant: str, session: str) -> tuple[SessionCopy, ...]:
        copies = self.copies.get((tenant, session), ())
        if isinstance(copies, ApiError):
            raise copies
        return copies

    async def forget_session(self, tenant: str, session: str) -> int:
        blocks = sum(copy.blocks for copy in await self.session(tenant, session))
        self.copies.pop((tenant, session), None)
        return blocks


CARD = ModelCard(
    names=("tiny", "alias/tiny"),
    max_model_len=512,
    vocab_size=TINY.vocabulary.size + 24,  # padded, as real models are
    pool_tokens=480,
    eos_ids=frozenset({END}),
)


def app_of(script: Script | Scripted, card: ModelCard = CARD, tokenizer: Tokenizer = TINY, **options: Any) -> FastAPI:
    completer = script if isinstance(script, Scripted) else Scripted(script)
    return build_app(completer, [ServedModel(tokenizer, lambda: card)], **options)


def send(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, answered whole."""

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tidegate") as client:
            return await client.request(method, path, **request)

    return asyncio.run(main())


def complete(app: FastAPI, **body: Any) -> httpx.Response:
    return send(app, "POST", "/v1/completions", json={"model": "tiny", "prompt": "hi"} | body)


def chat(app: FastAPI, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return send(app, "POST", "/v1/chat/completions", json={"model": "tiny", "messages": messages} | body)


def events(answer: httpx.Response | bytes) -> list[Any]:
    """A stream's events: JSON, and the string "[DONE]" for the end mark, without the comments between them. Checks that
    each is framed as one."""
    text = (answer if isinstance(answer, bytes) else answer.content).decode("utf-8")
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def joined(stream: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [choice for event in stream if event != "[DONE]" for choice in event.get("choices", [])]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in mine)


class Call:
    """One request over bare ASGI, whose client can watch each write and leave. `buffer` bounds the writes that wait for
    the client, the one numbered `break_at` fails as on a broken socket; not `whole`: more of the body was announced."""

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: bytes | list[bytes],
        headers: dict[str, str] | None = None,
        *,
        buffer: int = 0,
        break_at: int | None = None,
        whole: bool = True,
    ) -> None:
        self._pieces = [body] if isinstance(body, bytes) else body
        self._whole = whole
        self._break_at = break_at
        self._left = asyncio.Event()
        self.sent = 0
        self.read = 0
        self.writes: asyncio.Queue[dict[str, Any]] = asyncio.Queue(buffer)
        given = {"content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("tidegate", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def status(self) -> int:
        return int((await self.writes.get())["status"])

    async def write(self) -> bytes:
        return bytes((await self.writes.get())["body"])

    async def _send(self, message: Any) -> None:
        self.sent += 1
        if self.sent == self._break_at:
            raise OSError("the socket is closed")
        await self.writes.put(message)

    async def _receive(self) -> dict[str, Any]:
        if self.read < len(self._pieces):
            self.read += 1
            more = self.read < len(self._pieces) or not self._whole
            return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": more}
        await self._left.wait()
        return {"type": "http.disconnect"}
