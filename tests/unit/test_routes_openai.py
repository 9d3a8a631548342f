"""The official client, unchanged, against the app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from tests.scripted import app_of, ids, says
from tests.unit.test_routes_logprobs import tells
from tests.unit.test_routes_streams import FAILURES, fails_after

TEXT = "the quick brown fox 日本語 🙂"
HI: Any = [{"role": "user", "content": "hi"}]


def using(app: FastAPI, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tidegate")
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://tidegate/v1", http_client=http, max_retries=0
        ) as client:
            return await work(client)

    return asyncio.run(main())


def test_a_chat_is_answered_with_its_usage() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=50, seed=1)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2

    using(app_of(says(TEXT, cached=2)), work)


def test_a_chat_is_streamed() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, stop=["zzz"]
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5

    using(app_of(says(TEXT)), work)


def test_completions_take_each_form_of_prompt_and_our_own_fields() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        prompts: list[Any] = ["hi", ["hi", "ho"], [5, 6], [[5], [6, 7]]]
        for prompt in prompts:
            answer = await client.completions.create(model="tiny", prompt=prompt, extra_body={"top_k": 1, "min_p": 0.1})
            wanted = len(prompt) if isinstance(prompt[0], list) or prompt == ["hi", "ho"] else 1
            assert [choice.text for choice in answer.choices] == [TEXT] * wanted
            stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
            texts = [""] * wanted
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [TEXT] * wanted

    using(app_of(says(TEXT)), work)


def test_log_probabilities_are_the_clients_own_types() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        whole = await client.completions.create(model="tiny", prompt="hi", logprobs=2, echo=True)
        told = whole.choices[0].logprobs
        assert told is not None and told.tokens is not None and told.text_offset is not None
        assert "".join(told.tokens) == whole.choices[0].text == "hi" + TEXT
        answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        entries = answer.choices[0].logprobs
        assert entries is not None and entries.content is not None
        assert b"".join(bytes(entry.bytes or []) for entry in entries.content).decode() == TEXT
        assert all(len(entry.top_logprobs) == 2 for entry in entries.content)
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or []
        ]
        assert streamed == entries.content

    using(app_of(tells(ids(TEXT))), work)


def test_models_are_listed_and_retrieved() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["tiny", "alias/tiny"]
        assert (await client.models.retrieve("alias/tiny")).id == "alias/tiny"

    using(app_of(says(TEXT)), work)


def test_errors_are_the_clients_own_exceptions() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=HI, n=2)
        assert (bad.value.param, bad.value.code) == ("n", "unsupported_parameter")

    using(app_of(says(TEXT)), work)


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES[:2])
def test_failures_before_and_within_a_stream_are_raised(failure: Any, status: int, code: str) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIError) as failed:
            stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
            async for _ in stream:
                pass
        assert failed.value.code == code

    using(app_of(fails_after("", failure)), work)
    using(app_of(fails_after("the quick fox", failure)), work)
