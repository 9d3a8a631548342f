"""The roofline: what a step must compute and read, how shares follow from it, what several starts make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.bench import roofline
from deploy.bench.client import ServerError
from deploy.bench.standings import Range
from deploy.bench.stepwork import Peaks, Shape, Work
from kvstore.layout import KVLayout, LayerKV, Precision
from workers.models.reading import parse_native
from workers.plan import Draw, Row, StepPlan
from workers.settings import GroupSettings

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DRAW = Draw()


def shape(item: float = 2) -> Shape:
    spec = parse_native(SMOLLM2)
    layout = KVLayout(32, (LayerKV.pair(3, 64, Precision.BF16),) * 30)
    return Shape.of(spec, layout, item=item)


def test_models_whose_steps_are_made_of_other_things_have_no_roofline() -> None:
    moe = SMOLLM2 | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    layout = KVLayout(32, (LayerKV.pair(3, 64, Precision.BF16),) * 30)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM cannot be drawn"):
        Shape.of(parse_native(moe), layout, item=2)


def row(start: int, count: int, draw: Draw | None = DRAW) -> Row:
    return Row((0,) * count, start, ((0,),), draw)


def test_weights_are_counted_as_the_model_has_them() -> None:
    """SmolLM2-135M: 134.5 million weights, 28.3 of them the embedding that the logits share; 23,040 bytes of KV."""
    found = shape()
    norms = 576 * (2 * 30 + 1)
    assert found.layer_weights + found.head_weights + norms == 134_515_008
    assert found.head_weights == 28_311_552
    assert found.token_bytes == 23_040
    assert (found.layer_bytes, found.head_bytes) == (2 * found.layer_weights, 2 * found.head_weights)
    assert (shape(item=1).layer_bytes, shape(item=1).head_bytes) == (found.layer_weights, found.head_weights)


def test_a_decode_step_reads_the_weights_once_whatever_its_rows() -> None:
    found = shape()
    one, eight = (found.work(StepPlan(0, (row(160, 1),) * rows)) for rows in (1, 8))
    assert one.linear == 2 * (found.layer_weights + found.head_weights) and eight.linear == 8 * one.linear
    assert eight.other == 8 * one.other
    context = 23_040 * (161 + 1)  # 161 read, the new one written
    assert one.moved == found.layer_bytes + found.head_bytes + context
    assert eight.moved == one.moved + 7 * context
    assert one.other == 4 * 30 * 9 * 64 * 161


def test_a_chunk_whose_logits_nobody_needs_does_without_the_head() -> None:
    found = shape()
    chunk = found.work(StepPlan(0, (row(4, 3, None),)))
    assert chunk.linear == 3 * 2 * found.layer_weights
    assert chunk.other == 4 * 30 * 9 * 64 * (5 + 6 + 7)
    assert chunk.moved == found.layer_bytes + 23_040 * (7 + 3)


def test_a_whole_prompt_costs_the_same_attention_in_any_chunks() -> None:
    found = shape()
    whole = found.work(StepPlan(0, (row(0, 100, None),))).other
    parts = [found.work(StepPlan(0, (row(start, 20, None),))).other for start in range(0, 100, 20)]
    assert sum(parts) == whole == 4 * 30 * 9 * 64 * 5050


def test_the_least_time_is_that_of_the_scarcer() -> None:
    peaks = Peaks(linear=100.0, other=10.0, read=1000.0)
    assert peaks.seconds(Work(linear=200, other=30, moved=1000)) == pytest.approx(5.0)
    assert peaks.seconds(Work(linear=200, other=30, moved=9000)) == pytest.approx(9.0)


def start(seconds: float, linear: float = 4e11) -> dict[str, Any]:
    decode = {"steps": 10, "seconds": seconds, "least_s": 0.5, "tokens": 100, "sampled": 100}
    prefill = {"steps": 2, "seconds": 0.4, "least_s": 0.3, "tokens": 600, "sampled": 4}
    whole = {"steps": 12, "seconds": seconds + 0.4, "least_s": 0.8, "tokens": 700, "sampled": 104}
    level = {
        "clients": 4,
        "peaks": {"linear": linear, "other": linear, "read": 3e10},
        "phases": {"prefill": prefill, "decode": decode, "all": whole},
        "ttft_s": seconds / 10,
    }
    return {"kernels": "native-plain", "threads": 2, "meter": "native plain", "levels": [level]}


def test_shares_are_medians_over_the_starts() -> None:
    found = roofline.reached([start(1.0), start(0.625), start(2.0)])
    assert [(each.clients, each.phase) for each in found] == [(4, "prefill"), (4, "decode"), (4, "all")]
    prefill, decode, _ = found
    assert decode.share == Range(0.5, 0.25, 0.8)
    assert decode.rate == Range(100.0, 50.0, 160.0) and decode.allowed == Range(200.0, 200.0, 200.0)
    assert decode.step_ms.median == pytest.approx(100.0)
    assert prefill.rate.median == pytest.approx(1500.0), "computed tokens, not sampled ones"
    assert prefill.time.median == pytest.approx(0.4 / 1.4)
    roofline.reached_table(found)
    assert roofline.first_tokens([start(1.0), start(0.5), start(2.0)]) == {4: Range(100.0, 50.0, 200.0)}


def test_the_ceiling_is_said_with_its_range() -> None:
    said = roofline.ceiling([start(1.0), start(1.0, 4.5e11), start(1.0, 4.6e11)]).text()
    assert said == "multiply-adds 0.450 (0.400-0.460) × 10¹²/s, memory 30.0 GB/s"
    with pytest.raises(ServerError):
        roofline.ceiling([])


def test_each_start_gets_the_same_job_and_results_are_json() -> None:
    jobs: list[dict[str, Any]] = []

    def run(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(json.loads(json.dumps(job)))
        return start(1.0)

    settings = GroupSettings("/model", ("m",), threads=2)
    found = roofline.measure(
        settings, levels=(4,), prompt_tokens=8, max_tokens=2, seed=1, starts=3, tick=lambda *_: None, run=run
    )
    assert len(jobs) == 3 and jobs[0] == jobs[2]
    assert jobs[0]["settings"]["threads"] == 2 and jobs[0]["levels"] == [4]
    said = json.loads(json.dumps(roofline.as_json(found)))
    assert said["kernels"] == "native-plain" and said["rows"][1]["share"] == {"median": 0.5, "low": 0.5, "high": 0.5}


def test_an_engine_that_fails_says_why() -> None:
    job = {"settings": GroupSettings("/nowhere", ("m",)).plain, "levels": [1], "prompt_tokens": 1}
    with pytest.raises(ServerError, match=r"(?s)the engine failed.*nowhere"):
        roofline.in_a_process({**job, "max_tokens": 1, "seed": 0})


def test_the_command_prints_shares_and_one_json_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []

    def run(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        return start(1.0)

    monkeypatch.setattr(roofline, "in_a_process", run)
    monkeypatch.setattr("deploy.bench.comparisons.resolve", lambda model, revision, say: tmp_path / model)
    config = tmp_path / "service.yaml"
    config.write_text("block_size: 16\ntensor_parallel_size: 2\nthreads: 3\n")
    options = ["--config", str(config), "--model", "m", "--sweep", "2,4", "--max-tokens", "9", "--rounds", "2"]
    done = CliRunner().invoke(cli, ["bench", "--roofline", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert [(row["clients"], row["phase"]) for row in said["rows"]] == [(4, "prefill"), (4, "decode"), (4, "all")]
    assert any("kernels native-plain, 2 threads; at most (native plain): multiply-adds" in line for line in lines(done))
    assert "TTFT p50 by clients: 4: 100 ms" in lines(done)
    settings = jobs[0]["settings"]
    assert (settings["model_dir"], settings["block_size"], settings["threads"]) == (str(tmp_path / "m"), 16, 3)
    assert settings["tensor_parallel_size"] == 1, "the roofline of one rank"
    assert len(jobs) == 2 and jobs[0]["levels"] == [2, 4] and jobs[0]["max_tokens"] == 9


def lines(done: Any) -> list[str]:
    return [line.strip() for line in done.stdout.splitlines()]
