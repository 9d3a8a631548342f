"""`tidegate summarize` against a server that has every kind of trouble: each row ends as one record, or the batch says
that it does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.__main__ import cli
from deploy.jobs.client import BATCH
from tests.batch_server import BatchServer, Trouble, about, question
from tests.scripted import Scripted, app_of, chat, says
from workers.sequence import Priority

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()
TROUBLES = Callable[[int, dict[str, Any]], Trouble | None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"d{n}", "text": f"document number {n} is here"}) + "\n" for n in range(6))
    )
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deploy.jobs.pace.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))


def summarize(server: BatchServer | None, source: Path, *options: str, output: str = "out.jsonl") -> Result:
    where = ["--url", server.url] if server else []
    words = ["--input", str(source), "--output", str(source.parent / output), "--max-tokens", "8", *where, *options]
    return runner.invoke(cli, ["summarize", *words], env={"COLUMNS": "200"})


def records(source: Path, output: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (source.parent / output).read_text().splitlines()]


def test_every_document_gets_a_record_in_the_inputs_order(source: Path) -> None:
    with BatchServer() as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    found = records(source)
    assert [record["id"] for record in found] == [f"d{n}" for n in range(6)]
    assert found[3]["summary"] == "about document number 3 is." and found[3]["model"] == "stand-in"
    assert found[3]["usage"] == {"requests": 1, "prompt_tokens": 10, "completion_tokens": 8, "cached_tokens": 3}
    assert found[3]["tree"]["span"] == [0, len("document number 3 is here")]
    for part in ("6 done, 0 of them errors, 0 left", "108: 60 read (30% of them cached), 48 written, in 6 requests"):
        assert part in done.stderr, done.stderr
    assert "tokens/s" in done.stderr and "6/6 documents" in done.stderr


def test_requests_are_of_the_batch_class_and_share_a_session_and_a_beginning(source: Path) -> None:
    with BatchServer() as server:
        assert summarize(server, source).exit_code == 0
    assert set(server.tiers) == {"flex"} and set(server.classes) == {"batch"}
    assert len(set(server.sessions)) == 1 and str(server.sessions[0]).startswith("summarize-")
    heads = {question(body).partition("Text:\n")[0] for body in server.asked}
    assert len(heads) == 1 and len(heads.pop()) > 200
    assert set(server.timeouts) == {"3600"} and all(body["temperature"] == 0 for body in server.asked)
    assert server.counted == 1, "short texts need no counting"


def test_the_service_takes_them_for_batch_work() -> None:
    completer = Scripted(says("x"))
    assert chat(app_of(completer), **BATCH).status_code == 200
    assert [generation.priority for generation in completer.seen] == [Priority.BATCH]


def test_run_again_it_does_nothing_again(source: Path) -> None:
    with BatchServer() as server:
        assert summarize(server, source).exit_code == 0
        before = (source.parent / "out.jsonl").read_bytes()
        done = summarize(server, source)
        assert done.exit_code == 0 and "0 done, 6 done before" in done.stderr
    assert len(server.asked) == 6 and (source.parent / "out.jsonl").read_bytes() == before


def test_a_changed_document_a_new_one_and_a_lost_record_are_done(source: Path) -> None:
    with BatchServer() as server:
        assert summarize(server, source).exit_code == 0
        output = source.parent / "out.jsonl"
        output.write_bytes(output.read_bytes()[:-10])  # as a kill leaves it
        lines = source.read_text().splitlines()
        lines[1] = json.dumps({"id": "d1", "text": "quite another text"})
        source.write_text("\n".join([json.dumps({"id": "new", "text": "fresh words"}), *lines]))
        done = summarize(server, source)
    assert done.exit_code == 0 and "3 done, 4 done before" in done.stderr
    assert sorted(map(about, server.asked[6:])) == sorted(["fresh words", "quite another text", "document number 5 is"])
    assert [record["id"] for record in records(source)] == ["new", *(f"d{n}" for n in range(6))]
    assert [record["summary"] for record in records(source, "out.jsonl.superseded")] == ["about document number 1 is."]


@pytest.mark.parametrize(
    "options",
    [["--max-tokens", "9"], ["--temperature", "0.5"], ["--model", "second"], ["--context", "150"], ["template"]],
)
def test_results_of_other_settings_are_not_reused(source: Path, options: list[str]) -> None:
    template = source.parent / "template"
    template.write_text("Translate. Text:\n{text}")
    options = ["--prompt-template", str(template)] if options == ["template"] else options
    with BatchServer() as server:
        assert summarize(server, source).exit_code == 0
        done = summarize(server, source, *options)
        assert done.exit_code == 0 and "6 done, 0 of them" in done.stderr, done.output
    found = records(source)
    assert [record["id"] for record in found] == [f"d{n}" for n in range(6)]
    assert len(records(source, "out.jsonl.superseded")) == 6
    assert len({record["tidegate"]["settings"] for record in found}) == 1


def leaves(node: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The parts of the text below a node, and how many nodes stand above them."""
    if "parts" not in node:
        return [node], 0
    below = [leaves(part) for part in node["parts"]]
    return [leaf for found, _ in below for leaf in found], 1 + sum(above for _, above in below)


def test_a_long_document_is_summarized_in_parts(source: Path) -> None:
    sentences = [f"Sentence {n} of the report has exactly nine words. " for n in range(80)]
    paragraphs = ["".join(sentences[n : n + 8]) for n in range(0, 80, 8)]
    text = "\n\n".join(paragraphs)
    source.write_text(json.dumps({"id": "long", "text": text}))
    with BatchServer() as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    (record,) = records(source)
    parts, above = leaves(record["tree"])
    assert len(parts) == 10 and "".join(text[slice(*part["span"])] for part in parts) == text
    assert all(text[part["span"][0] :].startswith("Sentence") for part in parts)
    assert record["summary"] == record["tree"]["summary"] and record["tree"]["span"] == [0, len(text)]
    assert above == 3 and record["usage"]["requests"] == 13 == len(server.asked), (
        "two questions for ten answers, and one"
    )
    merging = [question(body) for body in server.asked if "Part 1: about Sentence 0 of the." in question(body)]
    assert len(merging) == 1 and "Part 2: about Sentence 8 of the." in merging[0]
    assert len({question(body).partition("Text:\n")[0] for body in server.asked}) == 1, "one instruction for all"
    assert all(len(question(body).split()) + 8 <= 200 for body in server.asked)


def test_a_server_with_less_room_than_it_says_gets_shorter_parts(source: Path) -> None:
    source.write_text(json.dumps({"id": "long", "text": "Some more words here. " * 60}))
    with BatchServer(context=1000, most=200) as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    assert "parts" in records(source)[0]["tree"]


def test_a_document_of_many_megabytes_is_counted_in_pieces(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.jobs.counting._CHARACTERS", 900)
    text = "Words of a document. " * 200
    source.write_text(json.dumps({"id": "long", "text": text}))
    with BatchServer() as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    parts, _ = leaves(records(source)[0]["tree"])
    assert "".join(text[slice(*part["span"])] for part in parts) == text and len(parts) >= 6
    assert server.longest <= 900


def test_bad_rows_become_error_records(source: Path) -> None:
    source.write_text(source.read_text() + '{"id": "half\n{"id": "empty", "text": ""}\n{"id": "d1", "text": "again"}\n')
    with BatchServer() as server:
        done = summarize(server, source)
        assert done.exit_code == 0 and "9 done, 3 of them errors, 0 left" in done.stderr
        again = summarize(server, source)
        assert again.exit_code == 0 and "0 done, 9 done before" in again.stderr
    errors = [record for record in records(source) if "error" in record]
    assert [(record["id"], record["line"]) for record in errors] == [(None, 7), ("empty", 8), (None, 9)]
    assert all(record["error"]["code"] == "invalid_row" for record in errors)


def test_a_document_that_the_server_refuses_is_an_error_record_until_it_is_retried(source: Path) -> None:
    refuse: list[TROUBLES] = [
        lambda _, body: Trouble(400, "chat_template_refused") if "number 2" in str(body) else None
    ]
    with BatchServer(troubles=lambda number, body: refuse[0](number, body)) as server:
        assert summarize(server, source).exit_code == 0
        assert records(source)[2]["error"] == {
            "code": "chat_template_refused",
            "message": "trouble chat_template_refused",
        }
        refuse[0] = lambda number, body: None
        assert summarize(server, source).exit_code == 0 and "error" in records(source)[2]
        assert summarize(server, source, "--retry-errors").exit_code == 0
    assert "summary" in records(source)[2] and len(records(source)) == 6


BUSY = [
    Trouble(429, "tenant_limit", {"retry-after": "0"}),
    Trouble(503, "cluster_full", {"retry-after": "0"}),
    Trouble(503, "not_ready"),
    Trouble(504, "timed_out"),
    Trouble(500, "internal_error"),
    Trouble(502),
    Trouble(kind="cut"),
    Trouble(kind="hang up"),
]


@pytest.mark.parametrize("trouble", BUSY, ids=lambda one: f"{one.status or one.kind} {one.code}")
def test_a_server_in_trouble_is_asked_again(source: Path, trouble: Trouble) -> None:
    with BatchServer(troubles=lambda number, _: trouble if number in (0, 1, 3, 6) else None) as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    assert [record["summary"] for record in records(source)] == [f"about document number {n} is." for n in range(6)]
    assert len(server.asked) == 6 + 4 and "waiting: " in done.stderr


def test_retry_after_is_waited_for(source: Path) -> None:
    with BatchServer(troubles=lambda n, _: Trouble(429, "x", {"retry-after": "1"}) if n == 0 else None) as server:
        done = summarize(server, source)
    seconds = float(done.stderr.partition(" written, over ")[2].partition(" s")[0] or "nan")
    assert done.exit_code == 0 and seconds >= 1.0


def test_an_error_within_a_stream_is_asked_again(source: Path) -> None:
    with BatchServer(trouble="error event") as server:

        def heal(number: int, _: object) -> None:
            if number == 3:
                server.trouble = None

        server.troubles = heal
        done = summarize(server, source)
    assert done.exit_code == 0 and len(records(source)) == 6, done.output


def test_a_document_on_which_the_server_always_fails_is_an_error_and_the_others_are_done(source: Path) -> None:
    with BatchServer(troubles=lambda _, body: Trouble(500, "x") if "number 2" in str(body) else None) as server:
        done = summarize(server, source)
    assert done.exit_code == 0, done.output
    assert ["error" in record for record in records(source)] == [False, False, True, False, False, False]
    assert records(source)[2]["error"]["code"] == "server_failed"


@pytest.mark.parametrize("status", [503, 500])
def test_a_server_that_never_answers_ends_the_batch_and_what_is_done_stays(source: Path, status: int) -> None:
    with BatchServer(troubles=lambda number, _: Trouble(status, "x") if number >= 3 else None) as server:
        done = summarize(server, source, "--patience", "0.3", "--max-in-flight", "1")
        assert done.exit_code == 1 and "--patience" in done.stderr and "left" in done.stderr
        ids = {record["id"] for record in records(source) if "summary" in record}
        assert len(ids) == 3
        server.troubles = lambda number, body: None
        assert summarize(server, source).exit_code == 0
    assert [record["id"] for record in records(source)] == [f"d{n}" for n in range(6)]


def test_a_server_that_is_not_there_is_waited_for_and_then_given_up(source: Path) -> None:
    done = summarize(None, source, "--url", "http://127.0.0.1:9", "--patience", "0.2")
    assert done.exit_code == 1 and "no answer for" in done.stderr and "Traceback" not in done.output


def test_in_flight_is_bounded(source: Path) -> None:
    with BatchServer(pause_s=0.01) as server:
        assert summarize(server, source, "--max-in-flight", "2").exit_code == 0
    assert server.at_once == 2


def test_a_server_that_takes_three_at_once_is_not_pushed(source: Path) -> None:
    source.write_text("".join(json.dumps({"id": str(n), "text": f"number {n}"}) + "\n" for n in range(60)))
    refused = []

    def full(number: int, body: dict[str, Any]) -> Trouble | None:
        if server.running < 3:
            return None
        refused.append(number)
        return Trouble(429, "tenant_limit", {"retry-after": "0"})

    with BatchServer(pause_s=0.005, troubles=full) as server:
        done = summarize(server, source)
    assert done.exit_code == 0 and len(records(source)) == 60, done.output
    assert 0 < len(refused) < 40, "with 64 at once it would be refused hundreds of times"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal_it_goes_on_where_it_was(source: Path, number: signal.Signals) -> None:
    output = source.parent / "out.jsonl"
    with BatchServer(pause_s=0.05) as server:
        words = ["--input", str(source), "--output", str(output), "--url", server.url, "--max-tokens", "8"]
        command = [sys.executable, "-m", "deploy", "summarize", *words, "--max-in-flight", "1"]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 30
            while not (output.exists() and output.read_bytes().count(b"\n") >= 2):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        killed = number is signal.SIGKILL
        assert process.returncode == (-number if killed else 130), said
        assert killed or ("stopped; run the same command again" in said and "Traceback" not in said), said
        kept = {one["id"] for one in map(json.loads, output.read_text().splitlines()) if "summary" in one}
        assert 2 <= len(kept) < 6
        asked = len(server.asked)
        assert summarize(server, source, "--max-in-flight", "1").exit_code == 0
    assert len(server.asked) - asked == 6 - len(kept)
    assert [record["id"] for record in records(source)] == [f"d{n}" for n in range(6)]


def test_order_of_completion_leaves_records_as_they_came(source: Path) -> None:
    def slow_first(body: dict[str, Any]) -> tuple[str, ...]:
        return ("x",) * (40 if "number 1 " in question(body) else 1)

    with BatchServer(pause_s=0.01, reply=slow_first) as server:
        assert summarize(server, source, "--order", "completion").exit_code == 0
        ids = [record["id"] for record in records(source)]
        assert sorted(ids) == [f"d{n}" for n in range(6)] and ids.index("d1") > 1
        assert summarize(server, source).exit_code == 0
    assert [record["id"] for record in records(source)] == [f"d{n}" for n in range(6)]


def test_a_template_asks_something_else_with_fields_of_the_row(source: Path) -> None:
    template = source.parent / "template.txt"
    template.write_text("Is it about {topic}? Say yes or no.\nText:\n{text}\n")
    source.write_text('{"id": "a", "text": "rain", "topic": "weather"}\n{"id": "b", "text": "tea"}\n')
    with BatchServer() as server:
        done = summarize(server, source, "--prompt-template", str(template))
    assert done.exit_code == 0, done.output
    assert question(server.asked[0]) == "Is it about weather? Say yes or no.\nText:\nrain"
    assert "{topic}" in records(source)[1]["error"]["message"]


def test_a_folder_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("text b")
    (folder / "a.md").write_text("text a")
    with BatchServer() as server:
        assert summarize(server, folder).exit_code == 0
    assert [(one["id"], one["summary"]) for one in records(folder)] == [
        ("a.md", "about text a."),
        ("b.txt", "about text b."),
    ]


def requests(source: Path) -> None:
    body = {"model": "stand-in", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    rows = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
    rows[1]["body"] = {**body, "max_tokens": 10**6}
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"custom_id": "bad", "url": "/x", "body": {}}]))


def test_openais_batch_format_in_and_out(source: Path) -> None:
    requests(source)
    with BatchServer() as server:
        done = summarize(server, source)
        assert done.exit_code == 0, done.output
        assert summarize(server, source).exit_code == 0
    found = records(source)
    assert [record["custom_id"] for record in found] == ["r0", "r1", "r2", "bad"]
    assert found[0]["response"]["status_code"] == 200 and found[0]["error"] is None
    assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == "about ."
    assert found[0]["response"]["request_id"].startswith("r")
    assert found[1]["response"]["status_code"] == 400
    assert found[1]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert found[3]["response"] is None and "url must be" in found[3]["error"]["message"]
    assert set(server.tiers) == {"flex"} and len(server.asked) == 3, "once each"


def test_output_to_a_url(source: Path) -> None:
    with BatchServer() as server:
        words = ["--input", str(source), "--url", server.url, "--max-tokens", "8"]
        done = runner.invoke(cli, ["summarize", *words, "--output", f"file://{source.parent}/there/out.jsonl"])
        assert done.exit_code == 0, done.output
    assert [record["id"] for record in records(source, "there/out.jsonl")] == [f"d{n}" for n in range(6)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--input", "/nowhere"], "--input /nowhere: cannot be read"),
        (["--prompt-template", "/nowhere"], "--prompt-template /nowhere"),
        (["--model", "third"], "does not serve third; its models: stand-in, second"),
        (["--max-tokens", "150"], "--max-tokens 150: of 200 tokens"),
        (["--return"], "--return in a Ray job"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
        (["--key-file", "/nowhere"], "/nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_is_one_message(source: Path, options: list[str], says: str) -> None:
    with BatchServer() as server:
        done = summarize(server, source, *options)
    assert done.exit_code == 1 and says in done.stderr and "Traceback" not in done.output
    assert done.stderr.startswith("tidegate: ") and not server.asked


@pytest.mark.parametrize(("context", "counts", "says"), [(None, True, "--context"), (200, False, "--tokenizer")])
def test_a_server_that_does_not_say_enough_is_told_about(
    source: Path, context: int | None, counts: bool, says: str
) -> None:
    with BatchServer(context=context, counts=counts) as server:
        done = summarize(server, source)
    assert done.exit_code == 1 and says in done.stderr


def test_a_key_that_does_not_count_ends_the_batch_at_once(source: Path) -> None:
    with BatchServer(troubles=lambda *_: Trouble(401, "invalid_api_key")) as server:
        done = summarize(server, source)
    assert done.exit_code == 1 and "401" in done.stderr
    assert not (source.parent / "out.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("output", "options", "says"),
    [
        ("out.jsonl", [], "is relative, and a job's working folder is Ray's own copy"),
        ("/out.jsonl", [], "root file system"),
        ("file:///mnt/out.jsonl", [], "on this node alone"),
        ("/dev/shm/out.jsonl", [], "tmpfs"),
    ],
)
def test_in_a_ray_job_an_output_that_would_be_lost_is_refused(
    source: Path, output: str, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with BatchServer() as server:
        words = ["--input", str(source), "--url", server.url, "--max-tokens", "8", *options]
        done = runner.invoke(cli, ["summarize", *words, "--output", output])
        assert done.exit_code == 1 and says in done.stderr, done.output
        shared = ["--output", str(source.parent / "o"), "--output-is-shared"]
        assert runner.invoke(cli, ["summarize", *words, *shared]).exit_code == 0
