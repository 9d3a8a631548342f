"""Counters: how many tokens a text has, by the model's own tokenizer: one that lies here, or the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from cluster.errors import ApiError
from cluster.text.tokenizer import Tokenizer
from deploy.jobs.client import Refused, Server
from deploy.staging import ModelError

_AT_ONCE, _CHARACTERS = 128, 500_000
"""Texts, and characters, that one question about tokens holds: 6 MB of JSON at the most."""
_ANY = 10**9


class Counter(Protocol):
    """Counts tokens."""

    async def texts(self, texts: Sequence[str]) -> list[int]:
        """Of each text by itself, without special tokens beyond what a completion's prompt gets."""
        ...

    async def overhead(self, prompt: str) -> tuple[int, bool]:
        """Of a whole request with this prompt; as a chat, through the model's template, where it has one, which is the
        second value."""
        ...


class LocalCounter:
    """Counts with the tokenizer in `folder`. Raises ModelError when there is none."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.read(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"--tokenizer {folder}: {error}") from error

    async def texts(self, texts: Sequence[str]) -> list[int]:
        """See Counter."""
        return await asyncio.to_thread(lambda: [len(self._tokenizer.encode(text, _ANY)) for text in texts])

    async def overhead(self, prompt: str) -> tuple[int, bool]:
        """See Counter."""
        if not self._tokenizer.chats:
            return (await self.texts([prompt]))[0], False
        try:
            return len(self._tokenizer.encode_chat(_chat(prompt), _ANY)), True
        except ApiError as error:
            raise Refused(error.status, error.code, error.message) from error


class ServerCounter:
    """Counts with the server's own tokenizer (POST /tokenize)."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def texts(self, texts: Sequence[str]) -> list[int]:
        """See Counter."""
        sliced = [_slices(text) for text in texts]
        counts: list[int] = []
        for batch in _batches([piece for pieces in sliced for piece in pieces]):
            counts += await self._server.count({"prompt": batch})
        counted = iter(counts)
        return [sum(islice(counted, len(pieces))) for pieces in sliced]

    async def overhead(self, prompt: str) -> tuple[int, bool]:
        """See Counter."""
        try:
            return sum(await self._server.count({"messages": _chat(prompt)})), True
        except Refused as refused:
            if refused.code != "no_chat_template":
                raise
        return sum(await self._server.count({"prompt": [prompt]})), False


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _slices(text: str) -> list[str]:
    """A text that is too big for one question, in pieces: they may have a token more together than the whole has."""
    return [text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS)]


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and (len(batch) == _AT_ONCE or size + len(text) > _CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
