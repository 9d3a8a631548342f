"""The first answer: asks a running service one thing over HTTP, prints it as it streams, and says what to try next.

Knows the service's URL and nothing else of it.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from deploy.client import ServerError, events

QUESTION = "What is a tide gate, in one sentence?"
_TOKENS = 96
SHORT_ANSWER = 100
"""The limit in the lines to try: a small model may otherwise ramble on to the end of its context."""


async def stream(url: str, model: str, question: str, console: Console) -> int:
    """Print the answer to `question` as it comes; returns its tokens. Raises ServerError."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": _TOKENS}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    tokens = 0
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise ServerError(f"{response.status} {(await response.text())[:300]}")
            async for chunk in events(response):
                for choice in chunk.get("choices") or ():
                    text = choice.get("delta", {}).get("content") or ""
                    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"{url} did not answer: {error!r}") from error
    console.print()
    return tokens


def ask(url: str, model: str, question: str, console: Console) -> None:
    """Ask and print, for a caller that has no event loop. Raises ServerError."""
    console.print(f"\n[bold]you[/]    {escape(question)}\n[bold]{escape(model)}[/]  ", end="", soft_wrap=True)
    tokens = asyncio.run(stream(url, model, question, console))
    console.print(f"[dim]{tokens} tokens, over HTTP from {url}[/]\n", soft_wrap=True)


def curl_line(url: str, model: str) -> str:
    """A command that asks the service for a streamed chat answer."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": model, "messages": messages, "max_tokens": SHORT_ANSWER, "stream": True}
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def python_lines(url: str, model: str) -> str:
    """The same with OpenAI's own client."""
    return (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        "for chunk in client.chat.completions.create(\n"
        f'    model="{model}", max_tokens={SHORT_ANSWER}, stream=True,\n'
        '    messages=[{"role": "user", "content": "Name three rivers."}],\n'
        "):\n"
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
    )


def next_steps(url: str, model: str, command: str, console: Console) -> None:
    """Print what to try next, with `command` as the way to call Tidegate; plain lines that can be copied."""
    console.print("Try next, in another terminal:", style="bold")
    console.print(curl_line(url, model), markup=False, highlight=False, soft_wrap=True)
    console.print("\nor in Python (pip install openai):", style="bold")
    console.print(python_lines(url, model), markup=False, highlight=False, soft_wrap=True)
    console.print(
        Panel(
            f"Serving [bold]{escape(model)}[/] at [bold]{url}[/]."
            f"\n[bold]{command} status[/] shows it, [bold]{command} bench --url {url}[/] loads it.\n"
            "Ctrl-C lets running answers end, then stops everything.",
            expand=False,
        )
    )
