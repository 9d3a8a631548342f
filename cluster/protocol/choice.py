"""One choice of an answer while it grows: a generation's events to text, until it ends. Knows no HTTP and no JSON.

Several choices of one request run side by side and are merged in the order in which their events come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.errors import ApiError
from cluster.generation import Completer, Generation
from cluster.protocol.logprobs import Stretch, Trail
from cluster.text.spelling import Spelling
from cluster.text.tokenizer import Transcript
from workers.plan import Finish, TokenEvent

log = logging.getLogger("tidegate.ingress")


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`, perhaps none; `reason` is OpenAI's finish_reason, on the choice's last delta only.
    `told` are the tokens that the text shows, where log-probabilities were asked for."""

    index: int
    text: str
    reason: str | None = None
    told: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A choice that has ended: all of its deltas as one."""

    text: str
    reason: str
    told: tuple[Stretch, ...] = ()


class Choice:
    """What has come of one generation so far. `model` is the name by which the client asked for its model, `spelling`
    the model's. The text begins with `echo`. A transcript that is traced tells of its tokens."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        transcript: Transcript,
        model: str,
        spelling: Spelling,
        *,
        echo: str | None = None,
    ) -> None:
        self.index = index
        self.spelling = spelling
        self.generation = generation
        self.model = model
        self.cached = 0
        self._transcript = transcript
        self._echo = echo
        self._trail = Trail(transcript) if generation.sampling.logprobs is not None else None
        self._seen = 0

    @property
    def tells(self) -> bool:
        """Whether log-probabilities go with the text."""
        return self._trail is not None

    @property
    def output_tokens(self) -> int:
        """Tokens generated until the text ended, a stop token included."""
        return self._transcript.tokens

    def take(self, event: TokenEvent) -> Delta:
        """What this event adds. Raises ApiError when it ends the generation without an answer."""
        if event.finish in (Finish.ABORT, Finish.ERROR):
            raise self._failure(event)
        if event.tokens and event.index != self._seen:
            log.error("generation %s: event at token %d after %d", self.generation.id, event.index, self._seen)
            raise _broken()
        self._seen += len(event.tokens)
        self.cached = max(self.cached, event.cached)
        text = self._text(event)
        finish = Finish.STOP if self._transcript.stopped else event.finish
        told = self._told(event, text, finish is not None) if self._trail else ()
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        return Delta(self.index, text, finish.value if finish else None, told)

    def _told(self, event: TokenEvent, text: str, ended: bool) -> tuple[Stretch, ...]:
        trail = self._trail
        assert trail is not None
        echoed = None if self._echo is None else trail.echo(self.generation.prompt, event.prompt, self._echo)
        trail.add(event.tokens, event.logprobs)
        shown = trail.show(len(text), ended)
        return tuple(stretch for stretch in (echoed, shown) if stretch is not None)

    def _text(self, event: TokenEvent) -> str:
        last, stop_ids = event.tokens[-1:], self.generation.sampling.stop_ids
        ends = event.finish is Finish.STOP and not stop_ids.isdisjoint(last)
        text = self._transcript.feed(event.tokens[:-1] if ends else event.tokens)
        if self._transcript.stopped:
            return text
        if event.finish:
            text += self._transcript.finish()
        if ends:
            self._transcript.end()
        return text

    def _failure(self, event: TokenEvent) -> ApiError:
        log.error("generation %s ended: %s", self.generation.id, event.error or event.finish)
        if event.finish is Finish.ABORT:
            return ApiError("The server gave up this request. Send it again.", "aborted", retry_after=1.0)
        return _broken()


async def deltas(completer: Completer, choice: Choice) -> AsyncGenerator[Delta, None]:
    """One choice to its end, which closes the generation: a stop string aborts what runs on behind it."""
    async with aclosing(completer.generate(choice.generation)) as events:
        async for event in events:
            delta = choice.take(event)
            if delta.reason is not None and event.finish is None:
                completer.satisfy(choice.generation.id)
            yield delta
            if delta.reason is not None:
                return
    raise _broken()


def merged(completer: Completer, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    """The deltas of all choices as they come. The first failure ends them all."""
    if len(choices) == 1:
        return deltas(completer, choices[0])
    return _side_by_side(completer, choices)


async def collected(deltas: AsyncIterator[Delta], choices: Sequence[Choice]) -> list[Whole]:
    """The whole choices, in their order."""
    parts: list[list[Delta]] = [[] for _ in choices]
    async for delta in deltas:
        parts[delta.index].append(delta)
    return [
        Whole("".join(part.text for part in each), each[-1].reason or "", tuple(s for part in each for s in part.told))
        for each in parts
    ]


async def _side_by_side(completer: Completer, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    arrived: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(deltas(completer, choice)) as source:
                async for delta in source:
                    arrived.put_nowait(delta)
        except Exception as error:
            arrived.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(choice)) for choice in choices]
    try:
        running = len(pumps)
        while running:
            delta = await arrived.get()
            if isinstance(delta, BaseException):
                raise delta
            running -= delta.reason is not None
            yield delta
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


def _broken() -> ApiError:
    return ApiError("The model failed while it worked on this request. Send it again.", "generation_failed")
