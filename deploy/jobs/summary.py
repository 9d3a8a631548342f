"""Summary: one document to one answer, map-reduce where it is longer than the model's context.

Knows how to ask and how to count; neither where documents come from nor where answers go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.jobs.client import Answer, Refused, Server
from deploy.jobs.counting import Counter
from deploy.jobs.dispatch import Dispatch
from deploy.jobs.records import Usage
from deploy.jobs.rows import Document
from deploy.jobs.splitting import Span, TooSmall, split
from deploy.jobs.template import Template
from deploy.jobs.tree import Node, groups, joined, labelled

TOO_LONG = ("context_length_exceeded", "never_fits")
"""What servers say of a request that was counted too short."""
LABEL_TOKENS = 12
"""More than "Part 123: " and what stands between two answers have."""
_SHRINKS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """How questions are asked: `limit` tokens of text at the most in each, answers of `max_tokens`; `chat`: as a chat,
    through the model's template."""

    template: Template
    limit: int
    max_tokens: int
    temperature: float
    chat: bool

    @property
    def least(self) -> int:
        """The smallest limit with which two answers fit into one question."""
        return least_limit(self.max_tokens)


def least_limit(max_tokens: int) -> int:
    """The tokens that a question must have room for so that two answers of `max_tokens` fit."""
    return 2 * (max_tokens + LABEL_TOKENS)


class Summarizer:
    """Asks `server` through `dispatch`, counts with `counter`."""

    def __init__(self, server: Server, dispatch: Dispatch, counter: Counter, shape: Shape) -> None:
        self._server = server
        self._dispatch = dispatch
        self._counter = counter
        self._shape = shape

    async def summarize(self, document: Document, usage: Usage) -> Node:
        """The tree of answers; what it takes is added to `usage`. Raises Refused for a document that cannot be done,
        TemplateError, ServerError, GaveUp."""
        limit = self._shape.limit
        for _ in range(_SHRINKS):
            try:
                return await self._tree(document, limit, usage)
            except Refused as refused:
                # The server has less room than it said: its pool is smaller than the context, say.
                if refused.code not in TOO_LONG or limit // 2 < self._shape.least:
                    raise
                limit //= 2
        return await self._tree(document, limit, usage)

    async def _tree(self, document: Document, limit: int, usage: Usage) -> Node:
        try:
            spans = await self._spans(document.text, limit)
        except TooSmall as error:
            raise Refused(0, "cannot_be_split", str(error)) from error
        nodes = await _all(self._leaf(document, span, usage) for span in spans)
        while len(nodes) > 1:
            texts = [labelled(index, node.summary) for index, node in enumerate(nodes, 1)]
            counts = [count + LABEL_TOKENS for count in await self._count(texts)]
            try:
                runs = groups(counts, limit)
            except ValueError as error:
                raise Refused(0, "context_length_exceeded", str(error)) from error
            nodes = await _all(self._merged(document, nodes[run.start : run.stop], usage) for run in runs)
        return nodes[0]

    async def _leaf(self, document: Document, span: Span, usage: Usage) -> Node:
        answer = await self._ask(document, span.of(document.text), usage)
        return Node(span.start, span.end, _tokens(answer), answer.text.strip())

    async def _merged(self, document: Document, nodes: Sequence[Node], usage: Usage) -> Node:
        if len(nodes) == 1:
            return nodes[0]
        answer = await self._ask(document, joined([node.summary for node in nodes]), usage)
        return Node(nodes[0].start, nodes[-1].end, _tokens(answer), answer.text.strip(), tuple(nodes))

    async def _ask(self, document: Document, text: str, usage: Usage) -> Answer:
        shape = self._shape
        prompt = shape.template.render(text, document.fields)
        answer = await self._dispatch.send(
            lambda: self._server.ask(prompt, shape.max_tokens, chat=shape.chat, temperature=shape.temperature)
        )
        usage.add(answer.usage)
        return answer

    async def _spans(self, text: str, limit: int) -> list[Span]:
        """The parts; one where the text is so short that it fits for certain: a token is a byte at the least."""
        size = len(text.encode("utf-8"))
        if size <= limit:
            return [Span(0, len(text), size)]
        splitting = split(text, limit)
        try:
            asked = next(splitting)
            while True:
                asked = splitting.send(await self._count(asked))
        except StopIteration as done:
            return list(done.value)

    async def _count(self, texts: Sequence[str]) -> list[int]:
        return await self._dispatch.send(lambda: self._counter.texts(texts), learns=False)


def _tokens(answer: Answer) -> int | None:
    return answer.usage.get("prompt_tokens") if answer.usage else None


async def _all(questions: Iterable[Coroutine[Any, Any, Node]]) -> list[Node]:
    """All of them side by side; where one fails, the others are given up."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
