"""From a checked request to generations: prompts to tokens, limits, sampling. Everything that is refused for its size.

Long texts are encoded in a thread. Knows no HTTP: an ApiError is what it refuses with.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cluster.errors import ApiError
from cluster.generation import ModelCard
from cluster.protocol.api import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Message,
    PrewarmRequest,
    Prompt,
    Sampled,
    Scheduled,
    TokenizeRequest,
)
from cluster.protocol.caller import Caller
from cluster.protocol.choice import Choice
from cluster.protocol.schedule import Schedule
from cluster.protocol.served import ServedModels
from cluster.tenants import Tenant
from cluster.text.tokenizer import Tokenizer
from workers.sequence import Sampling

Result = TypeVar("Result")

_ANY_CONTEXT = 2**62
"""For texts that are only counted."""
SHORT = 2_000
"""Characters that are encoded on the event loop: about a millisecond. More go to a thread."""
MESSAGE_CHARS = 16
"""What a chat message costs on top of its text, in the same measure."""


@dataclass(frozen=True, slots=True)
class _Desk:
    """One request's model, as of now, and how the request is treated; `param` names the field that holds its prompt."""

    tokenizer: Tokenizer
    card: ModelCard
    schedule: Schedule
    param: str

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError (400) for one that is no token; a padded row of the model is none."""
        above = min(self.card.vocab_size, self.tokenizer.vocabulary.size)
        if ids and not (min(ids) >= 0 and max(ids) < above):
            message = f"'{param}' holds a token id that is not in the vocabulary: they go from 0 to {above - 1}."
            raise ApiError(message, "invalid_value", param)


class Intake:
    """Makes the choices of a request, or refuses it."""

    def __init__(self, models: ServedModels, threads: int = 2) -> None:
        self._models = models
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def completion(self, asked: CompletionRequest, caller: Caller) -> list[Choice]:
        """One choice per prompt."""
        desk = self._desk(asked, caller, "prompt")
        prompts = await self._encoded(asked.prompt, desk)
        return _choices(
            "cmpl", asked, [(one, _sampling(asked, one, DEFAULT_COMPLETION_TOKENS, desk)) for one in prompts], desk
        )

    async def chat(self, asked: ChatRequest, caller: Caller) -> list[Choice]:
        """One choice."""
        desk = self._desk(asked, caller, "messages")
        prompt = await self._rendered(asked.messages, desk)
        return _choices("chatcmpl", asked, [(prompt, _sampling(asked, prompt, None, desk))], desk)

    async def prewarm(self, asked: PrewarmRequest, caller: Caller) -> list[Choice]:
        """One choice per prompt, each without a token to generate."""
        if (asked.messages is None) == (asked.prompt is None):
            raise _either()
        if asked.messages is not None:
            desk = self._desk(asked, caller, "messages")
            prompts = [await self._rendered(asked.messages, desk)]
        else:
            desk = self._desk(asked, caller, "prompt")
            prompts = await self._encoded(asked.prompt or (), desk)
        return _choices("prewarm", asked, [(one, _no_sampling(one, desk)) for one in prompts], desk)

    async def tokens(self, asked: TokenizeRequest, tenant: Tenant) -> tuple[list[tuple[int, ...]], ModelCard]:
        """The tokens of each prompt, however many there are, and the card of their model."""
        tokenizer, card = self._models.pick(asked.model, tenant)
        if (asked.messages is None) == (asked.prompt is None):
            raise _either()
        if asked.messages is not None:
            return [await self._chatted(asked.messages, tokenizer, _ANY_CONTEXT)], card
        return await self._texts(asked.prompt or (), tokenizer, _ANY_CONTEXT), card

    async def off_loop(self, long: bool, work: Callable[..., Result], *arguments: object) -> Result:
        """`work(*arguments)`, in a thread when it takes `long`."""
        if not long:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    def _desk(self, asked: Scheduled, caller: Caller, param: str) -> _Desk:
        tokenizer, card = self._models.pick(asked.model, caller.tenant)
        return _Desk(tokenizer, card, Schedule.of(asked, caller), param)

    async def _encoded(self, prompts: Sequence[Prompt], desk: _Desk) -> list[tuple[int, ...]]:
        return await self._texts(prompts, desk.tokenizer, desk.card.max_model_len)

    async def _rendered(self, turns: Sequence[Message], desk: _Desk) -> tuple[int, ...]:
        return await self._chatted(turns, desk.tokenizer, desk.card.max_model_len)

    async def _texts(self, prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int) -> list[tuple[int, ...]]:
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self.off_loop(size > SHORT, _ids_of, prompts, tokenizer, context)

    async def _chatted(self, turns: Sequence[Message], tokenizer: Tokenizer, context: int) -> tuple[int, ...]:
        messages = [turn.fields() for turn in turns]
        size = sum(MESSAGE_CHARS + len(message["content"]) for message in messages)
        return await self.off_loop(size > SHORT, tokenizer.encode_chat, messages, context)


def _either() -> ApiError:
    return ApiError("Send either 'messages' or 'prompt'.", "invalid_value", "messages")


def _ids_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int) -> list[tuple[int, ...]]:
    return [tokenizer.encode(one, context) if isinstance(one, str) else one for one in prompts]


def _choices(
    kind: str, asked: Scheduled, parts: Sequence[tuple[tuple[int, ...], Sampling]], desk: _Desk
) -> list[Choice]:
    stops = tuple(asked.stop or ()) if isinstance(asked, Sampled) else ()
    keyed = asked.prompt_cache_key if isinstance(asked, Sampled) else None
    id = f"{kind}-{uuid.uuid4().hex}"
    made = []
    for index, (prompt, sampling) in enumerate(parts):
        generation = desk.schedule.generation(f"{id}-{index}", prompt, sampling, desk.card.names[0], keyed)
        made.append(Choice(index, generation, desk.tokenizer.transcript(stops), asked.model))
    return made


def _sampling(asked: Sampled, prompt: Sequence[int], default: int | None, desk: _Desk) -> Sampling:
    card, ids = desk.card, asked.stop_token_ids or []
    desk.check_ids(prompt, desk.param)
    desk.check_ids(ids, "stop_token_ids")
    # A control token never shows in the text: spelled out as a stop string, it is found by its id.
    spelled = [desk.tokenizer.special_id(stop) for stop in asked.stop or ()]
    stop_ids = {*ids, *(id for id in spelled if id is not None), *(() if asked.ignore_eos else card.eos_ids)}
    top_k = asked.top_k or 0
    top_p = 1.0 if asked.top_p is None else asked.top_p
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        max_tokens=_most_tokens(asked, len(prompt), default, card, desk.param),
        temperature=temperature if top_p > 0 else 0.0,
        top_k=top_k if 0 < top_k < card.vocab_size else 0,
        top_p=top_p if top_p > 0 else 1.0,
        min_p=asked.min_p or 0.0,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**63,
        stop_ids=frozenset(stop_ids),
    )


def _no_sampling(prompt: Sequence[int], desk: _Desk) -> Sampling:
    """For a prompt that is only computed. It must leave room for an answer, as one that is to be continued."""
    desk.check_ids(prompt, desk.param)
    _room_for(len(prompt), None, desk.card, desk.param)
    return Sampling(max_tokens=0)


def _most_tokens(asked: Sampled, prompt: int, default: int | None, card: ModelCard, param: str) -> int:
    """The output limit for a prompt of so many tokens. Raises ApiError (400), with the numbers, if there is no room."""
    most = asked.most_tokens
    if asked.max_completion_tokens not in (None, most):
        message = "'max_tokens' and 'max_completion_tokens' differ: send one of them."
        raise ApiError(message, "invalid_value", "max_completion_tokens")
    room = _room_for(prompt, most, card, param)
    return min(room, default or room) if most is None else most


def _room_for(prompt: int, most: int | None, card: ModelCard, param: str) -> int:
    """The most that an answer to so long a prompt may have, or ApiError (400)."""
    if prompt == 0:
        raise ApiError(f"'{param}' is empty: it has no tokens.", "invalid_value", param)
    room = _room(prompt, most, card.max_model_len, "the model's context", "context_length_exceeded", param)
    if card.pool_tokens is None:
        return room
    return min(room, _room(prompt, most, card.pool_tokens, "the cluster's KV cache", "never_fits", param))


def _room(prompt: int, most: int | None, limit: int, holder: str, code: str, param: str) -> int:
    """Tokens left for the answer, at least 1. Raises ApiError when the prompt, or what was asked for with it, exceeds
    the limit."""
    if prompt + (most or 1) <= limit:
        return limit - prompt
    asked = f" and max_tokens is {most}, together {prompt + most}" if most is not None else ""
    raise ApiError(
        f"The {param} has {prompt} tokens{asked}; {holder} holds {limit} for prompt and answer together.", code, param
    )
