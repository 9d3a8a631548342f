"""Tenants, sessions and two models on a running service: who hits whose cache, in pairs; keys that come and go."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.tenants import hash_of
from deploy.config import ClusterConfig
from tests.ray.stage import PATIENCE_S, Stage, eventually

BLOCK = 16
WORDS = [f"word{n}" for n in range(400)]
PUBLIC = "All of our guests may know that " + " ".join(WORDS[:60])
TENANTS: list[dict[str, Any]] = [
    {"name": "a", "keys": [hash_of("key-a"), hash_of("key-a-second")]},
    {"name": "a:b", "keys": [hash_of("key-a:b")]},
    {"name": "batch", "classes": ["batch"], "models": ["small"], "keys": [hash_of("key-batch")]},
]


@dataclass
class Clients:
    """Clients of the service on the stage, each with its tenant's key."""

    stage: Stage
    keys_file: Path
    serial: int = 0

    def write(self, *tenants: dict[str, Any]) -> None:
        self.keys_file.write_text(yaml.safe_dump({"tenants": list(tenants)}))

    def call(self, method: str, path: str, key: str | None, session: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if session is not None:
            headers["x-session-id"] = session
        content = {"json": body} if body else {}
        return httpx.request(method, f"{self.stage.url}{path}", headers=headers, timeout=PATIENCE_S, **content)

    def cached(self, key: str, session: str | None, prompt: Any, **fields: Any) -> int:
        """The tokens of the prompt that were found in the cache."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
        answer = self.call("POST", "/v1/completions", key, session, **body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def prompt(self) -> list[int]:
        """Ten blocks that no test has asked before."""
        self.serial += 1
        return [1000 + (self.serial * 977 + n * 13) % 30_000 for n in range(10 * BLOCK)]


@pytest.fixture(scope="module")
def clients(stage: Stage, tiny_model: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("tenancy")
    clients = Clients(stage, folder / "keys.yaml")
    clients.write(*TENANTS)
    (folder / "public.yaml").write_text(yaml.safe_dump({"prompts": [{"text": PUBLIC}]}))
    (folder / "secret").write_bytes(b"a secret of the namespaces" * 2)
    section = {
        "model": str(tiny_model),
        "dtype": "fp32",
        "threads": 1,
        "kv_memory": "24MiB",
        "block_size": BLOCK,
        "max_model_len": 2048,
    }
    stage.show(
        ClusterConfig.model_validate(
            {
                "models": [section | {"served_model_names": ["tiny"]}, section | {"served_model_names": ["small"]}],
                "port": port,
                "device": "cpu",
                "drain_s": 2.0,
                "api_keys_file": str(clients.keys_file),
                "public_prompts_file": str(folder / "public.yaml"),
                "namespace_secret_file": str(folder / "secret"),
            }
        )
    )
    yield clients
    clients.write(*TENANTS)


HITS = 9 * BLOCK
"""Of ten blocks: the last token is always computed."""


def test_a_session_hits_itself_and_nobody_else_does(clients: Clients) -> None:
    prompt = clients.prompt()
    assert clients.cached("key-a", "s", prompt) == 0
    assert clients.cached("key-a-second", "s", prompt) == HITS, "another key of the same tenant"
    assert clients.cached("key-a", "t", prompt) == 0, "another session"
    assert clients.cached("key-a:b", "s", prompt) == 0, "another tenant"
    assert clients.cached("key-a", None, prompt) == 0, "no session"
    assert clients.cached("key-a", "s", prompt, model="small") == 0, "another model"
    assert clients.cached("key-a", "s", prompt) == HITS


def test_look_alikes_miss_each_other_and_hit_themselves(clients: Clients) -> None:
    prompt = clients.prompt()
    assert clients.cached("key-a", "b:c", prompt) == 0
    assert clients.cached("key-a:b", "c", prompt) == 0
    assert clients.cached("key-a", "b:c", prompt) == HITS == clients.cached("key-a:b", "c", prompt)


def test_a_public_prompt_hits_for_all_and_what_follows_it_for_nobody_else(clients: Clients) -> None:
    text = f"{PUBLIC} " + " ".join(WORDS[200:300])
    first = clients.cached("key-a", "public-1", text)
    mine = clients.cached("key-a", "public-1", text)
    other = clients.cached("key-a:b", "public-2", text)
    assert first < other < mine
    assert other >= 2 * BLOCK and other % BLOCK == 0
    assert clients.cached("key-a:b", None, text) == other, "also without a session"


def test_a_session_is_prewarmed_shown_and_forgotten(clients: Clients) -> None:
    prompt = clients.prompt()
    path = "/v1/sessions/warm%2Fed"
    prewarmed = clients.call("POST", f"{path}/prewarm", "key-a", model="tiny", prompt=prompt, keep_alive=900).json()
    assert prewarmed["usage"]["prompt_tokens"] == len(prompt)
    assert prewarmed["usage"]["completion_tokens"] == 0
    shown = eventually(lambda: clients.call("GET", path, "key-a").json()["copies"], 10)
    assert len(shown) == 1 and shown[0]["blocks"] == 10
    assert shown[0]["expires_s"] > 600, "kept for as long as was asked"
    assert clients.cached("key-a", "warm/ed", prompt) == HITS
    assert clients.call("GET", path, "key-a:b").json()["copies"] == []
    assert clients.call("DELETE", path, "key-a:b").json()["blocks"] == 0
    assert clients.cached("key-a", "warm/ed", prompt) == HITS, "another tenant forgets its own"
    assert clients.call("DELETE", path, "key-a").json()["blocks"] == 10
    assert clients.cached("key-a", "warm/ed", prompt) == 0


def test_each_model_answers_by_its_name_and_only_to_whom_it_is_for(clients: Clients) -> None:
    shown = {
        key: [model["id"] for model in clients.call("GET", "/v1/models", key).json()["data"]]
        for key in ("key-a", "key-batch")
    }
    assert shown == {"key-a": ["tiny", "small"], "key-batch": ["small"]}
    assert clients.cached("key-batch", None, "hello", model="small") == 0
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    assert clients.call("POST", "/v1/completions", "key-batch", **body).status_code == 403


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_a_key_nothing_is_served_but_the_health(clients: Clients, key: str | None) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/sessions/s")):
        answer = clients.call(method, path, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert clients.call("GET", "/health", key).status_code == 200


def test_a_revoked_key_is_refused_within_five_seconds_and_its_stream_goes_on(clients: Clients) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer key-a"}
    url = f"{clients.stage.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        clients.write(*TENANTS[1:])
        began = time.monotonic()
        eventually(lambda: clients.call("GET", "/v1/models", "key-a").status_code == 401, 5)
        assert time.monotonic() - began < 5
        written = [line for line in lines if line.startswith("data: ")]
    assert written[-1] == "data: [DONE]"
    assert json.loads(written[-2][6:])["choices"][0]["finish_reason"] == "length"
    clients.write(*TENANTS)
    eventually(lambda: clients.call("GET", "/v1/models", "key-a").status_code == 200, 5)
