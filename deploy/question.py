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

from deploy.bench.client import ServerError, events

QUESTION = "What is a tide gate, in one sentence?"
_TOKENS = 96
KEY = "TIDEGATE_API_KEY"
"""The variable that the printed lines take an API key from; we ourselves do not read it."""
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


def curl_line(url: str, model: str, *, keyed: bool = False) -> str:
    """A command that asks the service for a streamed chat answer; `keyed`: with the API key in a variable."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    body = {"model": model, "messages": messages, "max_tokens": SHORT_ANSWER, "stream": True}
    key = f' -H "Authorization: Bearer ${KEY}"' if keyed else ""
    return f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def python_lines(url: str, model: str, *, keyed: bool = False) -> str:
    """The same with OpenAI's own client."""
    key = f'os.environ["{KEY}"]' if keyed else '"none"'
    return (
        f"{'import os; ' if keyed else ''}from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key={key})\n'
        "for chunk in client.chat.completions.create(\n"
        f'    model="{model}", max_tokens={SHORT_ANSWER}, stream=True,\n'
        '    messages=[{"role": "user", "content": "Name three rivers."}],\n'
        "):\n"
        '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
    )


def next_steps(url: str, model: str, command: str, console: Console, *, keyed: bool = False) -> None:
    """Print what to try next, with `command` as the way to call Tidegate; plain lines that can be copied. `keyed`: the
    service wants an API key."""
    console.print("Try next, in another terminal:", style="bold")
    console.print(curl_line(url, model, keyed=keyed), markup=False, highlight=False, soft_wrap=True)
    console.print("\nor in Python (pip install openai):", style="bold")
    console.print(python_lines(url, model, keyed=keyed), markup=False, highlight=False, soft_wrap=True)
    console.print(
        Panel(
            f"Serving [bold]{escape(model)}[/] at [bold]{url}[/]."
            f"\n[bold]{command} status --watch[/] shows it, [bold]{command} bench --url {url}[/] loads it.\n"
            "Ctrl-C lets running answers end, then stops everything.",
            expand=False,
        )
    )
