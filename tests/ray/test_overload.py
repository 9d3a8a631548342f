"""More work than the pool holds, on the real model in fp32: the service slows down, answers honestly, loses nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.config import ClusterConfig, load
from tests.ray.stage import Stage, eventually

CLIENTS = 64
PATIENCE_S = 420.0
PROMPTS = (
    "The three longest rivers of Europe are",
    "Once upon a time, in a village by the sea,",
    "To bake a simple bread you need",
    "The planets of the solar system, in order, are",
    "A short history of the bicycle:",
    "My favourite season is autumn, because",
    "In mathematics, a prime number is",
    "The captain looked at the dark clouds and said",
)
LENGTHS = (60, 75, 90, 105, 120, 70, 80, 100)
BLOCK = 16
POOL_BLOCKS = 48
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, head_dim, fp32


@pytest.fixture(scope="module")
def small_pool(stage: Stage, smollm2: Path, port: int) -> Stage:
    """SmolLM2 with a pool of 768 tokens: six of these requests, or one and a half of the longest prompts."""
    config: ClusterConfig = load(
        None,
        {
            "model": str(smollm2),
            "served_model_names": ("smollm2",),
            "port": port,
            "device": "cpu",
            "dtype": "fp32",
            "threads": 2,
            "kv_memory": POOL_BLOCKS * BLOCK * TOKEN_BYTES,
            "block_size": BLOCK,
            "max_model_len": 512,
            "max_num_batched_tokens": 256,
            "drain_s": 2.0,
            "line": {"requests": 40},
            "ladder": {"trim_up": 0.7, "trim_down": 0.5},  # six requests fill so small a pool by large steps
        },
    )
    return stage.show(config)


@dataclass
class Watch:
    """What `status` showed while a load ran."""

    stage: Stage
    levels: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        while not self.stop.wait(0.2):
            for group in self.stage.groups():
                if not self.levels or self.levels[-1] != group["level"]:
                    self.levels.append(group["level"])

    def __enter__(self) -> Watch:
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def ask(stage: Stage, answers: Counter[str], **fields: Any) -> dict[str, Any]:
    """One completion, asked again after `Retry-After` while the answer is an honest 503."""
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True, **fields}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.post(f"{stage.url}/v1/completions", json=body, timeout=PATIENCE_S)
        if answer.status_code == 200:
            answers["200"] += 1
            found: dict[str, Any] = answer.json()
            return found
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["code"] == "cluster_full", error
        wait = int(answer.headers["retry-after"])
        assert 1 <= wait <= 60, "a bounded time, in whole seconds"
        answers[error["code"]] += 1
        assert time.monotonic() < deadline, "never taken"
        time.sleep(min(wait, 5))


def counters(stage: Stage) -> Counter[str]:
    return Counter(
        {name: stage.total(name) for name in ("computed_tokens", "recomputed_tokens", "preemptions", "ooms")}
    )


@pytest.mark.slow
def test_64_clients_at_once_in_a_pool_for_six_all_get_their_solo_text(small_pool: Stage) -> None:
    answers: Counter[str] = Counter()
    solo = [
        ask(small_pool, Counter(), prompt=prompt, max_tokens=length)["choices"][0]["text"]
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    before = counters(small_pool)

    def client(number: int) -> tuple[int, str]:
        kind = number % len(PROMPTS)
        tier = "flex" if number % 2 else "default"
        body = {"prompt": PROMPTS[kind], "max_tokens": LENGTHS[kind], "service_tier": tier}
        return kind, ask(small_pool, answers, **body)["choices"][0]["text"]

    with Watch(small_pool) as watch, ThreadPoolExecutor(CLIENTS) as pool:
        for kind, text in pool.map(client, range(CLIENTS)):
            assert text == solo[kind]
    spent = counters(small_pool) - before
    assert answers["200"] == CLIENTS
    assert answers["cluster_full"] > 0, "more came at once than line and pool hold"
    assert spent["recomputed_tokens"] <= 0.03 * spent["computed_tokens"], spent
    assert "trim" in watch.levels and sum(group["changes"] for group in small_pool.groups()) >= 1, watch.levels
    eventually(lambda: {group["level"] for group in small_pool.groups()} == {"normal"}, 60)
    eventually(lambda: small_pool.total("held") == 0 and small_pool.total("grants") == 0, 10)


@pytest.mark.slow
def test_long_documents_in_a_pool_for_one_and_a_half_finish_beside_short_requests(small_pool: Stage) -> None:
    answers: Counter[str] = Counter()
    document = [100 + n % 1000 for n in range(500)]
    done = threading.Event()

    def read(client: int) -> dict[str, Any]:
        return ask(small_pool, answers, prompt=[client + 3, *document], max_tokens=11)

    def chat(client: int) -> Iterator[int]:
        while not done.is_set():
            usage = ask(small_pool, answers, prompt=PROMPTS[client], max_tokens=8)["usage"]
            yield usage["completion_tokens"]

    with ThreadPoolExecutor(7) as pool:
        short = [pool.submit(lambda n=n: list(chat(n))) for n in range(3)]
        long = [usage["usage"] for usage in pool.map(read, range(4))]
        done.set()
        lengths = [length for future in short for length in future.result()]
    assert [usage["completion_tokens"] for usage in long] == [11] * 4
    assert [usage["prompt_tokens"] for usage in long] == [501] * 4
    assert len(lengths) >= 3 and set(lengths) == {8}
    assert small_pool.total("ooms") == 0
    eventually(lambda: small_pool.total("held") == 0 and small_pool.total("committed") == 0, 10)
