"""Streams of every kind that run while something is killed, and what must be true before and afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import psutil

from tests.ray.stage import Stage, command_line, eventually, processes, rank_processes

Job = dict[str, Any]
WARM_CHUNKS = 12
"""A stream is under way when so many chunks have come."""


@dataclass(frozen=True)
class Answer:
    """What a client has got in the end; `told` are the tokens that came with log-probabilities."""

    text: str
    finish: str | None
    prompt_tokens: int
    completion_tokens: int
    told: tuple[str, ...] = ()


def jobs(stage: Stage, tokens: int) -> list[Job]:
    """Greedy and seeded streams of up to `tokens` tokens; of the last two, one ends at a stop string near the end, and
    the other asks for log-probabilities of all of its tokens, under penalties."""
    # Few candidates: among all of a flat distribution a last bit of a logit would sometimes pick a neighbour.
    seeded = {"temperature": 0.8, "top_k": 20, "seed": 11}
    plain: list[Job] = [
        {"prompt": "The lighthouse keeper said", "max_tokens": tokens},
        {"prompt": [17] * 40, "max_tokens": tokens, **seeded},
        {"prompt": "Once upon a time", "max_tokens": tokens, **seeded, "seed": 12},
    ]
    text = run(stage, plain[2]).text
    penalties = {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": tokens - 10}
    told: Job = {"prompt": "A storm came up", "max_tokens": tokens, **seeded, "logprobs": 2, "echo": True, **penalties}
    return [*plain, {**plain[2], "stop": [_unique_piece(text)]}, told]


def run(stage: Stage, job: Job, seen: Callable[[int], None] = lambda chunks: None) -> Answer:
    """One stream to its end; `seen` hears of every chunk."""
    pieces: list[str] = []
    told: list[str] = []
    offsets: list[int] = []
    finish, usage = None, {}
    for count, chunk in enumerate(stage.stream(**job, stream_options={"include_usage": True}), 1):
        for choice in chunk["choices"]:
            pieces.append(choice["text"])
            finish = choice["finish_reason"] or finish
            if choice["logprobs"]:
                told += choice["logprobs"]["tokens"]
                offsets += choice["logprobs"]["text_offset"]
        usage = chunk.get("usage") or usage
        seen(count)
    if "logprobs" in job:  # each token once, whatever happened on the way
        assert "".join(told) == "".join(pieces)
        assert len(told) == usage["prompt_tokens"] + usage["completion_tokens"]
        assert offsets == [0, *accumulate(map(len, told[:-1]))]
    return Answer("".join(pieces), finish, usage["prompt_tokens"], usage["completion_tokens"], tuple(told))


def run_all(stage: Stage, work: Sequence[Job], disturb: Callable[[], None] | None = None) -> list[Answer]:
    """All jobs at the same time; `disturb` is called once each of them is under way."""
    under_way = threading.Barrier(len(work) + 1)

    def one(job: Job) -> Answer:
        return run(stage, job, lambda count: under_way.wait(60) if disturb and count == WARM_CHUNKS else None)

    with ThreadPoolExecutor(len(work)) as pool:
        answers = [pool.submit(one, job) for job in work]
        if disturb:
            under_way.wait(60)
            disturb()
        return [answer.result() for answer in answers]


def settle(stage: Stage, groups: int, ranks: int) -> None:
    """Wait until the service is whole again and nothing is held, granted or left over.

    All in one look: a death that is heard of late makes void what an earlier look saw.
    """

    def at_rest() -> list[dict[str, Any]] | None:
        rows = stage.groups()
        if [row["state"] for row in rows] != ["up"] * groups:
            return None
        busy = sum(row["pool"]["held"] + row["committed"] + row["running"] + row["grants"] for row in rows)
        return None if busy else rows

    for pool in [row["pool"] for row in eventually(lambda: answers(at_rest), 90)]:
        assert pool["free"] + pool["idle"] + pool["dirty"] == pool["total"]
    eventually(lambda: len(rank_processes()) == groups * ranks, 20)


def answers(question: Callable[[], object]) -> object:
    """What `question` says; None while whoever it asks is not there."""
    try:
        return question()
    except Exception:
        return None


def replicas(deployment: str) -> list[psutil.Process]:
    """Processes of a deployment's replicas."""
    name = f"ServeReplica:tidegate:{deployment}"
    return [process for process in processes() if name in command_line(process)]


def _unique_piece(text: str) -> str:
    """Eight characters that come late in `text` and not before."""
    return next(
        text[at : at + 8]
        for at in range(len(text) * 3 // 4, len(text) - 8)
        if text.find(text[at : at + 8]) == at and "\ufffd" not in text[at : at + 8]
    )
