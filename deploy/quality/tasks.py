"""Tasks with known answers, from files in the formats of GSM8K, HumanEval and MMLU: questions as completion prompts,
and whether a reply is right.

GSM8K (arXiv 2110.14168): a line of JSON each, the answer's number behind "####". HumanEval (arXiv 2107.03374): a line
of JSON each, plain or gzipped; right is what passes its tests. MMLU (arXiv 2009.03300): CSV without a head of question,
four choices, and the letter of the right one. Knows no HTTP.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.quality.sandbox import passes

LETTERS = "ABCD"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_CODE_ENDS = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(")


class TaskError(ValueError):
    """A file that holds no such task; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` for /v1/completions; `example`: the same with its right answer, to stand before others; `grade` says
    whether a reply is right (it may take seconds and run code)."""

    prompt: str
    example: str
    grade: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Kind:
    """One format: `parse` makes a question of a record; so many examples stand before a question by default; where a
    reply ends."""

    name: str
    parse: Callable[[Mapping[str, Any]], Question]
    shots: int
    stop: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Task:
    """The questions of one file that are asked, each with its examples before it."""

    kind: Kind
    prompts: tuple[str, ...]
    questions: tuple[Question, ...]


def read_task(name: str, path: Path, *, limit: int | None = None, shots: int | None = None) -> Task:
    """The task `name` (a key of KINDS) in `path`. The first `shots` questions become the examples of all the others, of
    which the first `limit` are asked. Raises TaskError."""
    kind = KINDS.get(name)
    if kind is None:
        raise TaskError(f"task {name!r} is not known; known: {', '.join(KINDS)}")
    questions = []
    for line, record in enumerate(_records(name, path), 1):
        try:
            questions.append(kind.parse(record))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise TaskError(f"{path}: record {line} is none of {name}: {error!r}") from error
    first = kind.shots if shots is None else shots
    asked = questions[first:][:limit]
    if len(asked) < 2:
        raise TaskError(f"{path} has {len(questions)} questions: with {first} examples too few are left to ask")
    head = "".join(f"{question.example}\n\n" for question in questions[:first])
    return Task(kind, tuple(head + question.prompt for question in asked), tuple(asked))


def number_of(text: str) -> str | None:
    """The number that an answer comes to: behind "####", else the last one; without commas and idle zeros."""
    marked = text.rpartition("####")[2] if "####" in text else ""
    found = _NUMBER.findall(marked)[:1] or _NUMBER.findall(text)[-1:]
    if not found:
        return None
    whole, point, part = found[0].replace(",", "").partition(".")
    part = part.rstrip("0")
    return f"{whole or '0'}.{part}" if point and part else whole or "0"


def letter_of(text: str) -> str | None:
    """The first of A to D that stands alone."""
    found = re.search(rf"(?<![A-Za-z])[{LETTERS}](?![A-Za-z])", text)
    return found[0] if found else None


def _gsm8k(record: Mapping[str, Any]) -> Question:
    answer = number_of(record["answer"])
    if answer is None or "####" not in record["answer"]:
        raise ValueError("its answer has no number behind ####")
    prompt = f"Question: {record['question']}\nAnswer:"
    return Question(prompt, f"{prompt} {record['answer']}", lambda reply: number_of(reply) == answer)


def _humaneval(record: Mapping[str, Any]) -> Question:
    prompt, tests, entry = record["prompt"], record["test"], record["entry_point"]
    if not str(entry).isidentifier():
        raise ValueError(f"entry_point {entry!r} is no name")

    def grade(reply: str) -> bool:
        return passes(f"{prompt}{reply}\n\n{tests}\n\ncheck({entry})\n").passed

    return Question(prompt, prompt + record.get("canonical_solution", ""), grade)


def _mmlu(record: Mapping[str, Any]) -> Question:
    question, *choices, answer = record["row"]
    answer = answer.strip()
    if len(choices) != len(LETTERS) or answer not in LETTERS or not answer:
        raise ValueError("a row is a question, four choices, and A, B, C or D")
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    prompt = "\n".join((question, *lines, "Answer:"))
    return Question(prompt, f"{prompt} {answer}", lambda reply: letter_of(reply) == answer)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gsm8k", _gsm8k, 5, ("\nQuestion:",), 320),
        Kind("humaneval", _humaneval, 0, _CODE_ENDS, 384),
        Kind("mmlu", _mmlu, 5, ("\n",), 4),
    )
}


def _records(name: str, path: Path) -> Sequence[Mapping[str, Any]]:
    """The file's lines of JSON, or rows of CSV. Raises TaskError."""
    try:
        content = path.expanduser().read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
        if name == "mmlu":
            return [{"row": row} for row in csv.reader(io.StringIO(text, newline="")) if row]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise TaskError(f"{path}: cannot be read as {name}: {error}") from error
