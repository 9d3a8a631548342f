"""A service on hosts of its own: who deploys it there, and streams of it that go on while something is disturbed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import httpx

from tests.ray.deployer import SAYS
from tests.ray.hosts import GCS_PORT, Host
from tests.ray.stage import eventually

TOKENS = 800
BACK_S = 90.0
"""How long a machine full of other work may need until a group is whole again."""
WARM = 12
JOBS: list[dict[str, Any]] = [
    {"prompt": "The lighthouse keeper said", "max_tokens": TOKENS},
    {"prompt": [17] * 40, "max_tokens": TOKENS, "temperature": 0.8, "top_k": 20, "seed": 11},
    {"prompt": "Far out at sea", "max_tokens": TOKENS, "temperature": 0.8, "top_k": 20, "seed": 6},
]


class Deployer:
    """The process on `host` that has deployed a service on the Ray whose head is `head`, and says how it is. `how` is
    one of the deployer's words, `told` its environment."""

    def __init__(self, host: Host, head: Host, how: str, config: dict[str, Any], told: Mapping[str, str]) -> None:
        words = (sys.executable, "-m", "tests.ray.deployer", f"{head.address}:{GCS_PORT}", how, json.dumps(config))
        self._process = host.start(*words, environment=told)
        self.said: list[str] = []
        while (line := self._read()).get("up") is None:
            self.said.append(line["said"])
        self.url = str(line["up"])

    def status(self) -> dict[str, Any]:
        """What the coordinator says."""
        self._pipe(self._process.stdin).write("status\n")
        self._pipe(self._process.stdin).flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """The next of its own lines; Ray puts some between them."""
        for line in self._pipe(self._process.stdout):
            if line.startswith(SAYS):
                found: dict[str, Any] = json.loads(line.removeprefix(SAYS))
                return found
        raise AssertionError(f"the deployer has ended, after saying: {self.said}")

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


class Served:
    """A service with one group, asked from `host`."""

    def __init__(self, host: Host, deployer: Deployer) -> None:
        self.host = host
        self.deployer = deployer
        self.expected = self.answers()

    def group(self) -> dict[str, Any]:
        rows = self.deployer.status()["groups"]
        return rows[0] if len(rows) == 1 else {"state": f"there are {len(rows)} groups"}

    def wait_until_whole(self) -> dict[str, Any]:
        """The group, once it is up again and nothing runs or is held."""

        def at_rest() -> dict[str, Any] | None:
            group = self.group()
            if group["state"] != "up" or group["pool"] is None:  # joined, and not reported yet
                return None
            return None if group["running"] or group["grants"] or group["pool"]["held"] else group

        found: dict[str, Any] = eventually(at_rest, BACK_S)
        return found

    def answers(self, disturb: Callable[[], None] | None = None) -> list[str]:
        """What comes for each of JOBS, asked at once; `disturb` is called once each is under way."""
        chunks = [0] * len(JOBS)

        def one(index: int) -> str:
            text = ""
            for piece in stream(self.deployer.url, JOBS[index]):
                text += piece
                chunks[index] += 1
            return text

        with self.host.clients(len(JOBS)) as pool:
            asked = [pool.submit(one, index) for index in range(len(JOBS))]
            if disturb:
                eventually(lambda: all(count >= WARM for count in chunks) or any(each.done() for each in asked))
                assert not any(each.done() for each in asked), [each.exception() for each in asked if each.done()]
                disturb()
            return [each.result() for each in asked]


def config(model: Path, **more: Any) -> dict[str, Any]:
    """Of a tiny model called so."""
    return {
        "model": str(model),
        "served_model_names": ["tiny"],
        "port": 8000,
        "device": "cpu",
        "dtype": "fp32",
        "threads": 1,
        "kv_memory": "48MiB",
        "block_size": 16,
        "max_model_len": 8192,
        "drain_s": 2.0,
        **more,
    }


def stream(url: str, job: dict[str, Any]) -> Iterator[str]:
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True, **job}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BACK_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk["choices"][0]["text"]
