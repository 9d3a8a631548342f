"""Scenarios: what crowds ask, with which key and class, for how long; and what is counted of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from aiohttp import web

from deploy.bench import scenarios
from deploy.bench.client import ServerError
from deploy.bench.crowds import Target, play, ttft_ratios
from deploy.bench.figures import Figures
from deploy.bench.scenarios import BATCH, FLOOD, QUIET, Crowd, Phase, Scenario
from tests.fake_server import FakeServer

KEYS = {FLOOD: "key of the flood", QUIET: "key of the quiet one"}


@dataclass
class Keyed(FakeServer):
    """Notes the key of each request beside its body."""

    keys: list[str | None] = field(default_factory=list)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        return await super()._generate(request)


def run(scenario: Scenario, server: FakeServer, **keys: str) -> list[Figures]:
    return asyncio.run(play(scenario, Target(server.url, "m", keys), lambda *_: None))


def one(*crowds: Crowd, seconds: float | None = None, warm_s: float = 0.0) -> Scenario:
    return Scenario("test", (Phase("phase", crowds, seconds, warm_s),))


def test_the_same_seed_asks_the_same_and_every_client_something_else() -> None:
    crowd = Crowd("c", 3, prompt_words=20, shortest=4, longest=40)

    def asked(client: int, seed: int) -> list[tuple[Any, ...]]:
        return [(step.prompt, step.max_tokens) for step in islice(crowd.steps(client, seed), 5)]

    assert asked(0, 1) == asked(0, 1)
    assert len({prompt for client in range(3) for seed in (1, 2) for prompt, _ in asked(client, seed)}) == 30
    assert all(10 <= len(prompt.split()) <= 30 and 4 <= tokens <= 40 for prompt, tokens in asked(2, 7))


def test_growing_outputs_grow_from_client_to_client() -> None:
    crowd = Crowd("c", 5, shortest=10, longest=50, growing=True, requests=1)
    assert [next(crowd.steps(n, 0)).max_tokens for n in range(5)] == [10, 20, 30, 40, 50]
    assert len(list(crowd.steps(0, 0))) == 1
    assert next(Crowd("c", 1, shortest=3, longest=9, growing=True).steps(0, 0)).max_tokens == 3


def test_a_closed_loop_keeps_every_client_busy_and_cuts_off_at_the_end() -> None:
    with FakeServer(pause_s=0.02) as server:
        (row,) = run(one(Crowd("c", 4), seconds=0.7), server)
    assert server.at_once == 4
    assert row.failed == 0 and 4 <= row.requests <= len(server.asked)
    assert row.wall_s == pytest.approx(0.7, abs=0.2)


def test_what_ends_in_the_warm_up_is_not_counted() -> None:
    with FakeServer(pause_s=0.02) as server:
        cold, warm = (run(one(Crowd("c", 4), seconds=0.8, warm_s=s), server)[0] for s in (0.0, 0.5))
    assert 0 < warm.requests < 0.8 * cold.requests
    assert warm.output_tok_s == pytest.approx(cold.output_tok_s, rel=0.5), "a rate of the time that is counted"


def test_a_phase_without_an_end_lasts_until_all_have_asked() -> None:
    with FakeServer(pause_s=0.001) as server:
        rows = run(scenarios.overload(clients=7, prompt_words=2, max_tokens=80), server)
    assert [(row.level, row.requests, row.failed) for row in rows] == [
        ("overload: interactive", 4, 0),
        ("overload: batch", 3, 0),
    ]
    classes = [body.get("service_tier") for body in server.asked]
    assert classes.count("flex") == 3 and classes.count(None) == 4
    assert sorted(body["max_tokens"] for body in server.asked) == [10, 10, 33, 45, 56, 80, 80]


def test_one_who_asks_by_the_clock_does_not_wait_for_answers() -> None:
    with FakeServer(pause_s=0.2) as server:
        (row,) = run(one(Crowd("quiet", 1, every_s=0.1, requests=5)), server)
    assert row.requests == 5 and server.at_once >= 3


def test_the_noisy_neighbour_has_four_phases_and_its_own_key_and_class() -> None:
    scenario = scenarios.neighbour(clients=3, seconds=0.4, prompt_words=2, max_tokens=8, every_s=0.05)
    with Keyed(pause_s=0.01) as server:
        rows = run(scenario, server, **KEYS)
    assert [row.level for row in rows] == [
        "idle: quiet",
        "flood: quiet",
        "flood: flood",
        "first come, first served: quiet",
        "first come, first served: flood",
        "batch: quiet",
        "batch: batch flood",
    ]
    calls = list(zip(server.keys, (body.get("service_tier") for body in server.asked), strict=True))
    quiet, flood = (f"Bearer {KEYS[name]}" for name in (QUIET, FLOOD))
    assert (quiet, None) in calls and (flood, None) in calls and (flood, "flex") in calls
    assert (quiet, "flex") not in calls and dict(BATCH) == {"service_tier": "flex"}
    lines = ttft_ratios(rows)
    assert [line.partition(":")[0] for line in lines] == [
        "quiet, idle",
        "quiet, flood",
        "quiet, first come, first served",
        "quiet, batch",
    ]
    assert "× idle" in lines[1] and "× first come, first served" in lines[1]
    assert "×" not in lines[0] and "× first come" not in lines[2]


def test_without_keys_no_key_is_sent() -> None:
    with Keyed() as server:
        run(one(Crowd("c", 1, requests=1)), server)
    assert server.keys == [None]


def test_a_server_that_fails_is_a_figure() -> None:
    with FakeServer(trouble="status") as server:
        (row,) = run(one(Crowd("c", 2, requests=2)), server)
    assert (row.requests, row.failed) == (4, 4) and row.errors[0][0].startswith("503 ")


def test_no_server_is_a_message() -> None:
    with pytest.raises(ServerError, match="does not answer"):
        asyncio.run(play(one(Crowd("c", 1)), Target("http://127.0.0.1:9"), lambda *_: None))


@pytest.mark.parametrize(
    ("text", "url", "model"),
    [
        ("http://h:1", "http://h:1", None),
        ("http://h:1/v1/", "http://h:1", None),
        ("http://h:1#fixed-4", "http://h:1", "fixed-4"),
        ("http://h:1/v1#a/b", "http://h:1", "a/b"),
    ],
)
def test_a_target_may_name_a_model(text: str, url: str, model: str | None) -> None:
    target = Target.read(text, KEYS)
    assert (target.url, target.model, target.keys) == (url, model, KEYS)
