"""Two models in one service: their own groups and lines, one coordinator; neither's pressure is the other's."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deploy.config import ClusterConfig
from tests.ray.stage import PATIENCE_S, Stage, eventually

FLOOD = 40


@pytest.fixture(scope="module")
def two(stage: Stage, tiny_model: Path, port: int) -> Stage:
    section = {"model": str(tiny_model), "dtype": "fp32", "threads": 1, "block_size": 16, "max_model_len": 1024}
    crowded = section | {"served_model_names": ["crowded"], "kv_memory": "1MiB", "max_num_seqs": 4}
    quiet = section | {"served_model_names": ["quiet"], "kv_memory": "8MiB"}
    models = {"models": [crowded, quiet], "port": port, "device": "cpu", "drain_s": 2.0, "line": {"requests": 8}}
    return stage.show(ClusterConfig.model_validate(models))


def complete(stage: Stage, model: str, tokens: int) -> httpx.Response:
    body = {"model": model, "prompt": [7] * 30, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{stage.url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_a_full_model_refuses_its_own_work_and_none_of_the_other_model(two: Stage) -> None:
    done = threading.Event()

    def flood(_: int) -> Counter[int]:
        seen: Counter[int] = Counter()
        while not done.is_set():
            seen[complete(two, "crowded", 200).status_code] += 1
            done.wait(0.2)
        return seen

    with ThreadPoolExecutor(FLOOD) as pool:
        flooding = [pool.submit(flood, number) for number in range(FLOOD)]
        eventually(lambda: two.status()["line"]["crowded"]["requests"] >= 6, 20)
        answers = [complete(two, "quiet", 20) for _ in range(10)]
        done.set()
        crowded = sum((future.result() for future in flooding), Counter())
    assert {answer.status_code for answer in answers} == {200}
    assert set(crowded) == {200, 503}, crowded
    groups = {group["models"][0]: group for group in two.groups()}
    assert set(groups) == {"crowded", "quiet"}
    eventually(lambda: two.total("held") == 0 and two.total("grants") == 0, 20)
