"""From a checked request to generations: prompts to tokens, limits, sampling. Everything that is refused for its size.

Long texts are encoded in a thread. Knows no HTTP: an ApiError is what it refuses with.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cluster.errors import ApiError
from cluster.generation import ModelCard
from cluster.protocol.api import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_LOGPROBS,
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
from workers.plan import Penalties
from workers.sequence import Sampling

Result = TypeVar("Result")

_ANY_CONTEXT = 2**62
"""For texts that are only counted."""
SHORT = 2_000
"""Characters that are encoded on the event loop: about a millisecond. More go to a thread."""
MAX_SCORES = 2**18
"""Log-probabilities of prompts in one answer: 8 MB of JSON, about."""
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
    """Makes the choices of a request, or refuses it. A completion may ask for `max_logprobs` likeliest tokens."""

    def __init__(self, models: ServedModels, threads: int = 2, max_logprobs: int = MAX_LOGPROBS) -> None:
        self._models = models
        self._max_logprobs = max_logprobs
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def completion(self, asked: CompletionRequest, caller: Caller) -> list[Choice]:
        """One choice per prompt."""
        desk = self._desk(asked, caller, "prompt")
        _check_completion(asked, self._max_logprobs)
        prompts = await self._encoded(asked.prompt, desk)
        samplings = [_sampling(asked, one, DEFAULT_COMPLETION_TOKENS, desk) for one in prompts]
        if not asked.echo:
            return _choices("cmpl", asked, list(zip(prompts, samplings, strict=True)), desk)
        _check_scores(prompts, asked.logprobs)
        samplings = [replace(sampling, prompt_logprobs=asked.logprobs) for sampling in samplings]
        parts = list(zip(prompts, samplings, strict=True))
        return await self.off_loop(sum(map(len, prompts)) > SHORT, _choices, "cmpl", asked, parts, desk, asked.prompt)

    async def chat(self, asked: ChatRequest, caller: Caller) -> list[Choice]:
        """One choice."""
        desk = self._desk(asked, caller, "messages")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs': true.", "invalid_value", "top_logprobs")
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
    kind: str,
    asked: Scheduled,
    parts: Sequence[tuple[tuple[int, ...], Sampling]],
    desk: _Desk,
    echoed: Sequence[Prompt] | None = None,
) -> list[Choice]:
    """One choice for each of `parts`; the text of each begins with its prompt when that is `echoed`."""
    stops = tuple(asked.stop or ()) if isinstance(asked, Sampled) else ()
    keyed = asked.prompt_cache_key if isinstance(asked, Sampled) else None
    id = f"{kind}-{uuid.uuid4().hex}"
    made = []
    for index, (prompt, sampling) in enumerate(parts):
        generation = desk.schedule.generation(f"{id}-{index}", prompt, sampling, desk.card.names[0], keyed)
        least = sampling.penalties.min_tokens if sampling.penalties else 0
        transcript = desk.tokenizer.transcript(stops, least=least, traced=sampling.logprobs is not None)
        echo = None
        if echoed is not None:
            sent = echoed[index]
            echo = transcript.echo(prompt, sent if isinstance(sent, str) else None)
        made.append(Choice(index, generation, transcript, asked.model, desk.tokenizer.spelling, echo=echo))
    return made


def _check_completion(asked: CompletionRequest, most: int) -> None:
    """Raises ApiError (400) for what a completion may not ask for."""
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError("'max_tokens' must be at least 1, or 'echo' true.", "invalid_value", "max_tokens")
    if asked.logprobs is not None and asked.logprobs > most:
        raise ApiError(f"'logprobs' must be at most {most}, the limit of this service.", "invalid_value", "logprobs")


def _check_scores(prompts: Sequence[Sequence[int]], top: int | None) -> None:
    """Raises ApiError (400) for more log-probabilities of prompts than one answer should hold."""
    tokens = sum(map(len, prompts))
    if top is not None and tokens * (1 + top) > MAX_SCORES:
        message = (
            f"'echo' with 'logprobs' {top} asks for {tokens * (1 + top)} log-probabilities of {tokens} prompt tokens; "
            f"at most {MAX_SCORES} go into one answer: send fewer prompts, or lower 'logprobs'."
        )
        raise ApiError(message, "invalid_value", "echo")


def _sampling(asked: Sampled, prompt: Sequence[int], default: int | None, desk: _Desk) -> Sampling:
    card, ids = desk.card, asked.stop_token_ids or []
    desk.check_ids(prompt, desk.param)
    desk.check_ids(ids, "stop_token_ids")
    # A control token never shows in the text: spelled out as a stop string, it is found by its id.
    spelled = [desk.tokenizer.special_id(stop) for stop in asked.stop or ()]
    stop_ids = {*ids, *(id for id in spelled if id is not None), *(() if asked.ignore_eos else card.eos_ids)}
    most = _most_tokens(asked, len(prompt), default, card, desk.param)
    top_k = asked.top_k or 0
    top_p = 1.0 if asked.top_p is None else asked.top_p
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        max_tokens=most,
        temperature=temperature if top_p > 0 else 0.0,
        top_k=top_k if 0 < top_k < card.vocab_size else 0,
        top_p=top_p if top_p > 0 else 1.0,
        min_p=asked.min_p or 0.0,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**63,
        stop_ids=frozenset(stop_ids),
        logprobs=_logprobs(asked),
        penalties=_penalties(asked, most, desk),
    )


def _penalties(asked: Sampled, most: int, desk: _Desk) -> Penalties | None:
    """What is done to logits, None when nothing is. Raises ApiError (400) for ids that are no token's, and for more
    tokens than there may be."""
    least = asked.min_tokens or 0
    if least > most:
        message = f"'min_tokens' is {least}, more than the {most} tokens that the answer may have."
        raise ApiError(message, "invalid_value", "min_tokens")
    names = asked.logit_bias or {}
    if not all(name.isascii() and name.isdigit() and len(name) < 20 for name in names):
        raise ApiError(
            "'logit_bias' must map token ids (as strings of digits) to numbers.", "invalid_value", "logit_bias"
        )
    ids = [int(name) for name in names]
    desk.check_ids(ids, "logit_bias")
    if len(set(ids)) < len(ids):
        raise ApiError("'logit_bias' names a token id twice.", "invalid_value", "logit_bias")
    made = Penalties(
        presence=asked.presence_penalty or 0.0,
        frequency=asked.frequency_penalty or 0.0,
        repetition=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        bias=tuple((id, value) for id, value in zip(ids, names.values(), strict=True) if value),
        min_tokens=least,
    )
    return None if made == Penalties() else made


def _logprobs(asked: Sampled) -> int | None:
    """How many likeliest tokens are to be told beside each token, None when nothing is."""
    if isinstance(asked, CompletionRequest):
        return asked.logprobs
    return (asked.top_logprobs or 0) if isinstance(asked, ChatRequest) and asked.logprobs else None


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
    """Tokens left for the answer, at least 1 unless none are wanted. Raises ApiError when the prompt, or what was asked
    for with it, exceeds the limit."""
    if prompt + (1 if most is None else most) <= limit:
        return limit - prompt
    asked = f" and max_tokens is {most}, together {prompt + most}" if most is not None else ""
    raise ApiError(
        f"The {param} has {prompt} tokens{asked}; {holder} holds {limit} for prompt and answer together.", code, param
    )
