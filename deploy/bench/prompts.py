"""What a benchmark asks: the same tasks for the same seed, whatever the server. Knows no HTTP and no clock.

A task is one client's work: steps that follow each other, one request each. A completion step carries its prompt; a
chat step adds messages to the conversation so far.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

Message = dict[str, str]

# Frequent nouns: about one token each in any English vocabulary.
_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue"
)
WORDS = tuple(_NOUNS.split())
_PREFIX_SEED = 12_345


class PromptError(ValueError):
    """A prompt file cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request: `prompt` for /v1/completions, else `messages` to add to the conversation of /v1/chat/completions.
    `max_tokens` None: the benchmark's own."""

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Requests that one client sends one after the other; `session` goes into the x-session-id header."""

    steps: tuple[Step, ...]
    session: str | None = None


def words(rng: random.Random, count: int) -> str:
    """`count` words drawn from `rng`."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def random_tasks(count: int, *, length: int, shared: int, seed: int) -> tuple[Task, ...]:
    """`count` completions of length/2 to 3·length/2 words each, behind `shared` words that all of them begin with."""
    rng = random.Random(seed)
    prefix = words(random.Random(_PREFIX_SEED), shared) + " " if shared else ""
    spans = (rng.randint(length // 2, length * 3 // 2) for _ in range(count))
    return tuple(Task((Step(prompt=prefix + words(rng, max(1, span))),)) for span in spans)


def session_tasks(count: int, *, turns: int, length: int, seed: int) -> tuple[Task, ...]:
    """`count` requests as conversations of `turns` user messages of `length` words; the last one may be shorter."""
    rng = random.Random(seed)
    tasks = []
    for number in range(-(-count // turns)):
        asked = min(turns, count - number * turns)
        steps = tuple(Step(messages=({"role": "user", "content": words(rng, length)},)) for _ in range(asked))
        tasks.append(Task(steps, session=f"bench-{seed}-{number}"))
    return tuple(tasks)


def file_tasks(path: Path, count: int) -> tuple[Task, ...]:
    """The first `count` lines of a JSONL file as tasks: {"prompt": text} or {"messages": […]}, either with optional
    "max_tokens" and "session". A shorter file is read again from its start. Raises PromptError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read: {error}") from error
    tasks = [_line_task(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise PromptError(f"{path}: holds no prompt")
    return tuple(tasks[index % len(tasks)] for index in range(count))


def _line_task(where: str, line: str) -> Task:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected an object")
    prompt, limit = value.get("prompt"), value.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise PromptError(f"{where}: max_tokens must be a positive number, got {limit!r}")
    session = str(value["session"]) if value.get("session") else None
    if isinstance(prompt, str) and prompt:
        return Task((Step(prompt=prompt, max_tokens=limit),), session)
    messages = _messages(value.get("messages"))
    if not messages:
        raise PromptError(f'{where}: expected {{"prompt": "…"}} or {{"messages": [{{"role": "…", "content": "…"}}]}}')
    return Task((Step(messages=messages, max_tokens=limit),), session)


def _messages(value: object) -> tuple[Message, ...]:
    """`value` as messages, if it is a list of {"role": text, "content": text}; else nothing."""
    if not isinstance(value, list):
        return ()
    messages = [item for item in value if isinstance(item, dict) and {"role", "content"} <= item.keys()]
    return tuple(messages) if len(messages) == len(value) else ()
