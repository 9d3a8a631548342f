"""A service that changes while it is used: settings within a heartbeat, groups one by one, no request fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import ray
import yaml

from cluster.coordination.control import Cordon, Empty, Revise
from cluster.registry import find_coordinator
from cluster.tenants import hash_of
from deploy import app
from deploy.config import ClusterConfig, ConfigError
from deploy.panel import Panel, Refused
from deploy.settings import digest_of, source_of
from tests.ray.stage import PATIENCE_S, Stage, eventually, rank_processes

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_S = 0.5
PROMPT = [2000 + 7 * n for n in range(160)]
"""Ten blocks."""


@pytest.fixture
def hand(tiny: Stage) -> Iterator[Panel]:
    """The panel of the service on the stage, which is left as it was found."""
    hand = Panel(tiny.link, "tidegate")
    before = hand.revision().edition
    yield hand
    number = hand.carry_out(Revise(before)).number
    for group in tiny.groups():
        hand.carry_out(Cordon(group["group"], on=False))
    hand.await_arrival(number, 10)


def cached(stage: Stage) -> int:
    return int(stage.complete(PROMPT, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"])


def epochs(stage: Stage) -> dict[str, int]:
    """Of each group; none while the coordinator does not answer."""
    try:
        return {group["group"]: group["epoch"] for group in stage.groups()}
    except ray.exceptions.RayError:
        return {}


def silent(text: str) -> None:
    """Nobody looks on."""


def test_live_settings_arrive_within_a_heartbeat_outlive_the_coordinator_and_go_back(
    tiny: Stage, hand: Panel, tiny_config: ClusterConfig
) -> None:
    base = hand.revision().number
    for _ in range(4):  # in both groups
        cached(tiny)
    assert cached(tiny) > 0
    ranks = rank_processes()
    changed = tiny_config.model_copy(update={"prefix_cache": False, "session_ttl_s": 60.0, "cache_scope": "session"})
    revision = hand.apply(changed, silent)
    began = time.monotonic()
    assert revision.number == base + 1 and hand.await_arrival(revision.number, 3 * PATIENCE_S) == []
    assert time.monotonic() - began < 3 * (2 * HEARTBEAT_S), "told with one reply, reported with the next beat"
    assert tiny.total("idle") == 0 and cached(tiny) == cached(tiny) == 0
    assert hand.apply(changed, silent) == revision, "nothing changes"

    before = epochs(tiny)
    ray.kill(find_coordinator("tidegate"), no_restart=False)
    eventually(lambda: (now := epochs(tiny)).keys() == before.keys() and all(now[one] > before[one] for one in now), 20)
    assert hand.revision() == revision
    assert hand.await_arrival(revision.number, 10) == []

    back = hand.rollback(silent)
    assert back.number == base + 2 and back.undone and hand.await_arrival(back.number, 10) == []
    for _ in range(4):
        cached(tiny)
    assert cached(tiny) > 0 and rank_processes() == ranks


def test_keys_are_asked_for_from_the_next_heartbeat_on_and_a_file_that_is_missing_there_changes_nothing(
    tiny: Stage, hand: Panel, tiny_config: ClusterConfig, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_of("key-a")]}]}))
    revision = hand.apply(tiny_config.model_copy(update={"api_keys_file": str(file)}), silent)
    assert hand.await_arrival(revision.number, 10) == []
    models = f"{tiny.url}/v1/models"
    assert httpx.get(models).status_code == 401
    assert httpx.get(models, headers={"authorization": "Bearer key-a"}).status_code == 200

    live = revision.edition.live
    assert live.ingress is not None
    lost = replace(live, ingress=replace(live.ingress, keys_file=str(tmp_path / "gone.yaml")))
    number = hand.carry_out(Revise(replace(revision.edition, live=lost))).number
    eventually(lambda: "gone.yaml: cannot be read" in str(hand.await_arrival(number, 0.5)), 10)
    assert httpx.get(models).status_code == 401

    (tmp_path / "gone.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "b", "keys": [hash_of("key-b")]}]}))
    eventually(lambda: hand.await_arrival(number, 0.5) == [], 30)
    assert httpx.get(models, headers={"authorization": "Bearer key-b"}).status_code == 200
    for _ in range(2):
        number = hand.rollback(silent).number
        assert hand.await_arrival(number, 10) == []
    assert httpx.get(models).status_code == 200


@pytest.mark.slow
def test_the_command_closes_a_group_and_changes_a_setting_from_another_process(
    tiny: Stage, hand: Panel, tiny_config: ClusterConfig, tmp_path: Path
) -> None:
    def tidegate(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy", *words, "--address", tiny.link.address]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    name = tiny.groups()[0]["group"]
    closed = tidegate("group", "drain", name, "--within", "5")
    assert closed.returncode == 0 and "is drained" in closed.stdout, closed.stderr
    assert tiny.groups()[0]["state"] == "cordoned"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(json.loads(source_of(tiny_config)) | {"log_level": "warning"}))
    applied = tidegate("config", "apply", str(file), "--json")
    assert applied.returncode == 0, applied.stderr
    said = json.loads(applied.stdout)
    assert [change["key"] for change in said["changes"]] == ["log_level"] and said["missing"] == []
    assert said["revision"] == hand.revision().number
    refused = tidegate("group", "uncordon", "nobody")
    assert refused.returncode == 1 and f"groups: {', '.join(sorted(epochs(tiny)))}" in refused.stderr


def test_what_is_not_live_is_refused_with_its_keys(hand: Panel, tiny_config: ClusterConfig) -> None:
    before = hand.revision()
    with pytest.raises(ConfigError, match=r"--rolling(.|\n)*block_size: 16 → 32 \(one group at a time\)"):
        hand.apply(tiny_config.model_copy(update={"block_size": 32, "session_ttl_s": 9.0}), silent)
    with pytest.raises(ConfigError, match=r"new cluster(.|\n)*port: \d+ → 1234"):
        hand.apply(tiny_config.model_copy(update={"port": 1234}), silent, rolling=True)
    with pytest.raises(ConfigError, match=r"api_keys_file: .*cannot be read"):
        hand.apply(tiny_config.model_copy(update={"api_keys_file": "/nowhere/keys.yaml"}), silent)
    assert hand.revision() == before


def test_a_group_that_is_restarted_hands_its_stream_over_and_takes_work_again(tiny: Stage, hand: Panel) -> None:
    whole = tiny.complete("The tide", max_tokens=400)["choices"][0]["text"]
    pieces: list[str] = []
    busy = ""
    for chunk in tiny.stream("The tide", max_tokens=400):
        pieces.append(chunk["choices"][0]["text"])
        if len(pieces) == 5:
            busy = next(group["group"] for group in tiny.groups() if group["grants"])
            epoch = next(group["epoch"] for group in tiny.groups() if group["group"] == busy)
            hand.carry_out(Empty(busy, 0.0, restart=True))
    assert "".join(pieces) == whole
    assert hand.await_group(busy, epoch, restart=True, within_s=PATIENCE_S) == "built anew"
    assert {group["state"] for group in tiny.groups()} == {"up"}
    with pytest.raises(Refused, match=f"no group called 'nobody'; groups: .*{busy}"):
        hand.carry_out(Cordon("nobody"))


class Load:
    """Clients that ask one after the other; `texts` are what they got, by prompt; `faults` what went wrong."""

    def __init__(self, stage: Stage) -> None:
        self.url = stage.url
        self.texts: dict[str, set[str]] = {}
        self.faults: list[str] = []
        self.asked = 0
        self._over = threading.Event()

    def ask(self, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        while not self._over.is_set():
            self.asked += 1
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
            except httpx.HTTPError as error:
                self.faults.append(f"{prompt}: {error!r}")
                continue
            if answer.status_code == 200:
                self.texts.setdefault(prompt, set()).add(answer.json()["choices"][0]["text"])
            else:
                self.faults.append(f"{prompt}: {answer.status_code} {answer.text}")

    @contextmanager
    def running(self, *prompts: str) -> Iterator[None]:
        with ThreadPoolExecutor(len(prompts)) as clients:
            tasks = [clients.submit(self.ask, prompt) for prompt in prompts]
            try:
                yield
            finally:
                self._over.set()
            for task in tasks:
                task.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "update", "code"),
    [(2, "stop-first", False), (1, "stop-first", True), (1, "surge", False)],
    ids=["two groups, one after the other", "one group, new code", "one group, its successor first"],
)
def test_groups_are_replaced_under_load_without_a_failed_request(
    stage: Stage, tiny_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, groups: int, update: str, code: bool
) -> None:
    config = tiny_config.model_copy(update={"groups": groups, "update": update})
    stage.show(config)
    hand = Panel(stage.link, "tidegate")
    changed = config.model_copy(update={"kv_memory": 40 * 2**20, "session_ttl_s": 200.0})
    if code:
        monkeypatch.setattr(app, "tidegate_version", lambda: "another")
    before, coordinator, ranks = stage.groups(), find_coordinator("tidegate")._actor_id, rank_processes()
    load = Load(stage)
    try:
        with load.running("The tide", "A river", "Some rain"):
            eventually(lambda: load.asked > 3)
            revision = hand.apply(changed, silent, rolling=True)
            asked = load.asked
            eventually(lambda: load.asked > asked + 3)
        assert not load.faults
        assert {prompt: len(texts) for prompt, texts in load.texts.items()} == dict.fromkeys(load.texts, 1)
        after = stage.groups()
        up = [group for group in after if group["state"] == "up"]
        assert len(up) == groups and not {group["group"] for group in up} & {group["group"] for group in before}
        assert up[0]["blocks"] < before[0]["blocks"] and not rank_processes() & ranks
        assert hand.await_arrival(revision.number, 10) == []
        assert (find_coordinator("tidegate")._actor_id == coordinator) is not code, "other code, another coordinator"
        version = httpx.get(f"{stage.url}/version").json()["version"]
        assert (version == "another") is code
        assert hand.revision().edition.digest == digest_of(changed)
    finally:
        stage.shown = None  # whoever comes next brings up what they need
