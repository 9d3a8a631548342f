"""From a checked request to generations: prompts to tokens, limits, sampling. Everything that is refused for its size.

Long texts are encoded in a thread. Knows no HTTP: an ApiError is what it refuses with.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from cluster.errors import ApiError, model_not_found
from cluster.generation import Generation, ModelCard
from cluster.protocol.api import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, Prompt, Sampled
from cluster.protocol.choice import Choice
from cluster.text.tokenizer import Tokenizer
from workers.sequence import Sampling

Result = TypeVar("Result")

SHORT = 2_000
"""Characters that are encoded on the event loop: about a millisecond. More go to a thread."""
MESSAGE_CHARS = 16
"""What a chat message costs on top of its text, in the same measure."""


class Intake:
    """Makes the choices of a request, or refuses it."""

    def __init__(self, tokenizer: Tokenizer, card: Callable[[], ModelCard], threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def completion(self, asked: CompletionRequest, session: str | None) -> list[Choice]:
        """One choice per prompt."""
        card = self._known(asked.model)
        size = sum(len(prompt) for prompt in asked.prompt if isinstance(prompt, str))
        prompts = await self.off_loop(size > SHORT, self._encoded, asked.prompt, card)
        return self._choices("cmpl", prompts, DEFAULT_COMPLETION_TOKENS, asked, session, card)

    async def chat(self, asked: ChatRequest, session: str | None) -> list[Choice]:
        """One choice."""
        card = self._known(asked.model)
        messages = [message.fields() for message in asked.messages]
        size = sum(MESSAGE_CHARS + len(message["content"]) for message in messages)
        prompt = await self.off_loop(size > SHORT, self._tokenizer.encode_chat, messages, card.max_model_len)
        return self._choices("chatcmpl", [prompt], None, asked, session, card)

    async def off_loop(self, long: bool, work: Callable[..., Result], *arguments: object) -> Result:
        """`work(*arguments)`, in a thread when it takes `long`."""
        if not long:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    def _known(self, model: str) -> ModelCard:
        card = self._card()
        if model not in card.names:
            raise model_not_found(model, card.names)
        return card

    def _encoded(self, prompts: Sequence[Prompt], card: ModelCard) -> list[tuple[int, ...]]:
        return [self._tokenizer.encode(one, card.max_model_len) if isinstance(one, str) else one for one in prompts]

    def _check_ids(self, ids: Sequence[int], card: ModelCard, param: str) -> None:
        above = min(card.vocab_size, self._tokenizer.vocabulary.size)  # a padded row of the model is no token
        if ids and not (min(ids) >= 0 and max(ids) < above):
            message = f"'{param}' holds a token id that is not in the vocabulary: they go from 0 to {above - 1}."
            raise ApiError(message, "invalid_value", param)

    def _choices(
        self,
        kind: str,
        prompts: Sequence[tuple[int, ...]],
        default: int | None,
        asked: Sampled,
        session: str | None,
        card: ModelCard,
    ) -> list[Choice]:
        param = "messages" if kind == "chatcmpl" else "prompt"
        for prompt in prompts:
            self._check_ids(prompt, card, param)
        sampling = [self._sampling(asked, _most_tokens(asked, len(one), default, card, param), card) for one in prompts]
        stops = tuple(asked.stop or ())
        id = f"{kind}-{uuid.uuid4().hex}"
        generations = [
            Generation(f"{id}-{index}", prompt, one, asked.model, session or asked.prompt_cache_key or None)
            for index, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
        ]
        return [Choice(index, one, self._tokenizer.transcript(stops)) for index, one in enumerate(generations)]

    def _sampling(self, asked: Sampled, max_tokens: int, card: ModelCard) -> Sampling:
        ids = asked.stop_token_ids or []
        self._check_ids(ids, card, "stop_token_ids")
        # A control token never shows in the text: spelled out as a stop string, it is found by its id.
        spelled = [self._tokenizer.special_id(stop) for stop in asked.stop or ()]
        stop_ids = {*ids, *(id for id in spelled if id is not None), *(() if asked.ignore_eos else card.eos_ids)}
        top_k = asked.top_k or 0
        top_p = 1.0 if asked.top_p is None else asked.top_p
        temperature = 1.0 if asked.temperature is None else asked.temperature
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature if top_p > 0 else 0.0,
            top_k=top_k if 0 < top_k < card.vocab_size else 0,
            top_p=top_p if top_p > 0 else 1.0,
            min_p=asked.min_p or 0.0,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**63,
            stop_ids=frozenset(stop_ids),
        )


def _most_tokens(asked: Sampled, prompt: int, default: int | None, card: ModelCard, param: str) -> int:
    """The output limit for a prompt of so many tokens. Raises ApiError (400), with the numbers, if there is no room."""
    most = asked.most_tokens
    if asked.max_completion_tokens not in (None, most):
        message = "'max_tokens' and 'max_completion_tokens' differ: send one of them."
        raise ApiError(message, "invalid_value", "max_completion_tokens")
    if prompt == 0:
        raise ApiError(f"'{param}' is empty: it has no tokens.", "invalid_value", param)
    room = _room(prompt, most, card.max_model_len, "the model's context", "context_length_exceeded", param)
    if card.pool_tokens is not None:
        room = min(room, _room(prompt, most, card.pool_tokens, "the cluster's KV cache", "never_fits", param))
    return min(room, default or room) if most is None else most


def _room(prompt: int, most: int | None, limit: int, holder: str, code: str, param: str) -> int:
    """Tokens left for the answer, at least 1. Raises ApiError when the prompt, or what was asked for with it, exceeds
    the limit."""
    if prompt + (most or 1) <= limit:
        return limit - prompt
    asked = f" and max_tokens is {most}, together {prompt + most}" if most is not None else ""
    raise ApiError(
        f"The {param} has {prompt} tokens{asked}; {holder} holds {limit} for prompt and answer together.", code, param
    )
