"""The benchmark against a server whose behaviour is known: what it sends, what it counts, what it reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.bench import load as bench
from deploy.bench.client import Sample, ServerError
from deploy.bench.figures import Figures, Spread, percentile
from deploy.bench.load import Load, compare
from deploy.bench.prompts import PromptError, file_tasks, random_tasks, session_tasks
from deploy.config import Environment
from deploy.tables import error_lines, ratios
from tests.fake_server import FakeServer


def run(load: Load, *servers: FakeServer) -> list[Figures]:
    return asyncio.run(compare(load, [(server.url, None) for server in servers], lambda *_: None))


def prompts(server: FakeServer) -> list[str]:
    return [body["prompt"] for body in server.asked]


def test_a_closed_loop_keeps_to_its_concurrency_and_counts() -> None:
    with FakeServer(pause_s=0.005) as server:
        (figures,) = run(Load(requests=12, levels=(3,), max_tokens=8), server)
    assert server.at_once == 3
    assert len(server.asked) == 13, "one to warm up, twelve to measure"
    assert (figures.requests, figures.failed, figures.output_tokens) == (12, 0, 96)
    assert (figures.prompt_tokens, figures.cached_tokens) == (120, 36)
    assert figures.output_tok_s == pytest.approx(96 / figures.wall_s)
    assert figures.ttft_ms and 5 <= figures.ttft_ms.p50 < 500
    assert figures.gap_ms and 4 <= figures.gap_ms.p50 < 500
    assert figures.tpot_ms and figures.tpot_ms.p50 == pytest.approx(3 * figures.gap_ms.mean / 7, rel=0.5)
    first = server.asked[1]
    assert (first["model"], first["max_tokens"], first["temperature"], first["ignore_eos"]) == ("stand-in", 8, 0, True)
    assert first["stream_options"] == {"include_usage": True}


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with FakeServer(pause_s=0.1) as server:
        (figures,) = run(Load(requests=10, levels=(100,), open_loop=True, warmup=0), server)
    assert figures.level == "100/s" and figures.failed == 0
    assert server.at_once >= 5


def test_every_server_is_asked_the_same_and_every_level_something_new() -> None:
    with FakeServer() as one, FakeServer() as other:
        figures = run(Load(requests=4, levels=(1, 2), warmup=0), one, other)
    assert sorted(prompts(one)) == sorted(prompts(other))
    assert len(set(prompts(one))) == 8
    assert [(row.server, row.level) for row in figures] == [
        (one.url, "1"),
        (other.url, "1"),
        (one.url, "2"),
        (other.url, "2"),
    ]


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("status", '503 {"error": {"message": "full"'),
        ("error event", "group died"),
        ("cut", "the stream ended without [DONE]"),
    ],
)
def test_failures_are_figures_not_exceptions(trouble: str, says: str) -> None:
    with FakeServer(trouble=trouble) as server:
        (figures,) = run(Load(requests=3, warmup=0), server)
    assert (figures.failed, figures.output_tok_s, figures.ttft_ms) == (3, 0, None)
    ((text, count),) = figures.errors
    assert says in text and count == 3
    assert error_lines([figures])[0].startswith(f"{server.url} at 8: 3 × ")


def test_without_usage_chunks_are_counted() -> None:
    with FakeServer(trouble="no usage") as server:
        (figures,) = run(Load(requests=2, warmup=0), server)
    assert figures.output_tokens == 8


def test_a_conversation_carries_its_history_and_its_session() -> None:
    with FakeServer() as server:
        run(Load(prompts="multi-turn", requests=5, turns=3, levels=(1,), warmup=0, prompt_words=2), server)
    roles = [[message["role"] for message in body["messages"]] for body in server.asked]
    assert roles == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant", "user", "assistant", "user"],
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert server.asked[1]["messages"][1]["content"] == "abcd"
    assert server.asked[1]["messages"][0] == server.asked[0]["messages"][0]
    assert server.sessions == ["bench-0-0"] * 3 + ["bench-0-1"] * 2


def test_a_file_gives_prompts_messages_limits_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "asks.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "one", "max_tokens": 3}, {"messages": messages, "session": "s"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    with FakeServer() as server:
        run(Load(prompts=str(path), requests=3, levels=(1,), warmup=0, max_tokens=9), server)
    assert [body.get("prompt") or body["messages"] for body in server.asked] == ["one", messages, "one"]
    assert [body["max_tokens"] for body in server.asked] == [3, 9, 3]
    assert server.sessions == [None, "s", None]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "x"}\n{', "asks.jsonl:2: not JSON"),
        ("[]", "asks.jsonl:1: expected an object"),
        ('{"messages": "x"}', "asks.jsonl:1: expected"),
        ('{"messages": [{"role": "user"}]}', "asks.jsonl:1: expected"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens must be a positive number"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "asks.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError) as refused:
        file_tasks(path, 1)
    assert says in str(refused.value)


def test_a_missing_prompt_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        file_tasks(tmp_path / "absent", 1)


def test_no_server_is_a_message_not_a_figure() -> None:
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 does not answer"):
        asyncio.run(compare(Load(), [("http://127.0.0.1:9", None)], lambda *_: None))


def test_a_server_that_fails_the_first_request_is_told() -> None:
    with FakeServer(trouble="status") as server, pytest.raises(ServerError, match="the first request failed: 503"):
        run(Load(), server)


def test_the_same_seed_asks_the_same() -> None:
    def texts(seed: int, shared: int = 0) -> list[str | None]:
        return [task.steps[0].prompt for task in random_tasks(6, length=20, shared=shared, seed=seed)]

    assert texts(1) == texts(1) != texts(2)
    lengths = [len(str(text).split()) for text in texts(1)]
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(set(lengths)) > 1
    heads = {tuple(str(text).split()[:9]) for seed in (1, 2) for text in texts(seed, shared=9)}
    assert len(heads) == 1
    assert session_tasks(4, turns=2, length=3, seed=1) == session_tasks(4, turns=2, length=3, seed=1)


def test_percentiles_interpolate() -> None:
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 10.0], 0.5) == 5.0
    assert percentile([float(n) for n in range(101)], 0.9) == pytest.approx(90.0)
    assert Spread.of([]) is None
    spread = Spread.of([0.001, 0.003])
    assert spread and (spread.mean, spread.p50) == (2.0, 2.0)


def figures_at(server: str, level: str, tokens: int) -> Figures:
    return Figures.of(server, level, [Sample(ttft=0.1, total=1.0, decode=0.9, output_tokens=tokens)], 1.0)


def test_ratios_pair_servers_by_level() -> None:
    rows = [figures_at("a", "1", 30), figures_at("b", "1", 10), figures_at("a", "2", 40), figures_at("b", "2", 80)]
    assert ratios(rows) == [
        "load 1: a gives 3.00 × the output rate of b",
        "load 2: a gives 0.50 × the output rate of b",
    ]


def test_figures_are_json() -> None:
    row = json.loads(json.dumps(figures_at("a", "1", 10).as_json()))
    assert row["output_tok_s"] == 10.0 and row["tpot_ms"]["p50"] == 100.0 and row["errors"] == []


@pytest.mark.parametrize("load", [Load(open_loop=True), Load(prompts="multi-turn")])
def test_a_static_batch_refuses_what_it_cannot_run(load: Load) -> None:
    with pytest.raises(PromptError):
        bench.baseline(load, Path("/nowhere"), dtype="bf16", threads=1)


def test_a_baseline_that_fails_shows_why() -> None:
    with pytest.raises(ServerError, match=r"(?s)baseline failed.*nowhere"):
        bench.baseline(Load(requests=1), Path("/nowhere"), dtype="bf16", threads=1)


@pytest.mark.slow
@pytest.mark.model
def test_the_baseline_runs_the_same_prompts_in_batches() -> None:
    folder = Environment.read().cache / "models" / "smollm2-135m"
    load = Load(requests=3, levels=(2,), prompt_words=8, max_tokens=2)
    rows: Sequence[Figures] = bench.baseline(load, folder, dtype="fp32", threads=2)
    assert [(row.level, row.requests, row.failed, row.output_tokens) for row in rows] == [("2", 3, 0, 6)]
    assert rows[0].prompt_tokens > 12
