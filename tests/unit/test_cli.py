"""The command line: options reach the parts, refusals are messages, output can be piped."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import deploy
from cluster.coordination.cards import GroupCard, RankCard
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.terms import CoordinatorTerms
from cluster.tenants import KeyRing, Tenant
from deploy.__main__ import cli
from deploy.config import ClusterConfig
from deploy.console import Stages
from deploy.house import strangers
from deploy.question import curl_line, python_lines
from kvstore.store import PoolReport
from tests.fake_server import FakeServer
from workers.plan import GroupReport

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


class Service:
    """A service that is up at a stand-in and notes that it was closed."""

    def __init__(self, url: str) -> None:
        self.url, self.closed = url, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_app(monkeypatch: pytest.MonkeyPatch):
    """`deploy.app` without Ray: notes the config it is run with; Ctrl-C comes as soon as the service is up."""
    app = types.ModuleType("deploy.app")
    app.configs = []  # type: ignore[attr-defined]
    app.services = []  # type: ignore[attr-defined]

    def start(url: str):
        def run(config: ClusterConfig, folders: list[Path], on_progress) -> Service:
            assert len(folders) == len(config.sections)
            app.configs.append(config)
            on_progress("starting Ray")
            app.services.append(Service(url))
            return app.services[-1]

        app.run = run  # type: ignore[attr-defined]
        return app

    monkeypatch.setitem(sys.modules, "deploy.app", app)
    monkeypatch.setattr(deploy, "app", app, raising=False)
    monkeypatch.setattr("deploy.__main__.resolve", lambda *_: Path("/model"))
    monkeypatch.setattr("deploy.__main__._wait_for_interrupt", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return start


def interrupted() -> None:
    """Stands for a wait that Ctrl-C ends."""
    raise KeyboardInterrupt


def test_serve_takes_options_before_the_file_asks_and_closes(fake_app, tmp_path: Path) -> None:
    with FakeServer() as server:
        app = fake_app(server.url)
        config = tmp_path / "c.yaml"
        config.write_text("port: 8123\ngroups: 2\n")
        options = ["--config", str(config), "--tp", "3", "--kv-memory", "72MiB", "--port", "8124", "--first-question"]
        done = runner.invoke(cli, ["serve", *options])
    assert done.exit_code == 0, done.output
    (given,) = app.configs
    assert (given.tensor_parallel_size, given.groups, given.port, given.kv_memory) == (3, 2, 8124, 72 * 2**20)
    assert "abcd" in done.stdout and "8 tokens" in done.stdout
    assert curl_line(server.url, "smollm2-135m") in done.stdout
    assert python_lines(server.url, "smollm2-135m") in done.stdout
    assert app.services[0].closed


def test_a_service_that_does_not_come_up_is_a_message(fake_app) -> None:
    from deploy.service import ServiceError

    def run(*_: object) -> None:
        raise ServiceError("there is no room")

    fake_app("").run = run
    done = runner.invoke(cli, ["serve"])
    assert done.exit_code == 1 and "there is no room" in done.stderr and "Traceback" not in done.output


def test_serve_closes_when_the_first_question_fails(fake_app) -> None:
    with FakeServer(trouble="status") as server:
        app = fake_app(server.url)
        done = runner.invoke(cli, ["serve", "--ask", "why?", "--port", "8125"])
    assert done.exit_code == 1 and "503" in done.stderr
    assert app.services[0].closed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["serve", "--kv-memory", "lots"], "--kv-memory: kv_memory: not a size"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["bench", "--url", "http://127.0.0.1:9"], "does not answer"),
        (["bench", "--sweep", "1,x"], "expected numbers"),
        (["bench", "--sweep", "0"], "expected numbers"),
        (["bench", "--sweep", "1,2", "--rate", "3"], "either --sweep or --rate"),
        (["bench", "--baseline", "other"], "the one there is: transformers"),
        (["bench", "--prompts", "/nowhere.jsonl"], "cannot be read"),
    ],
)
def test_a_refusal_is_one_message_and_no_traceback(options: list[str], says: str) -> None:
    with FakeServer() as server:
        needs_server = "--prompts" in options
        done = runner.invoke(cli, [*options, *(["--url", server.url] if needs_server else [])])
    assert done.exit_code == 1
    assert done.stderr.startswith("tidegate: ") and says in done.stderr and "Traceback" not in done.output


def test_bench_prints_a_table_and_one_json_line() -> None:
    with FakeServer() as server:
        done = runner.invoke(cli, ["bench", "--url", server.url + "/v1", "--requests", "4", "--sweep", "1,2"])
    assert done.exit_code == 0, done.output
    *table, line = done.stdout.splitlines()
    assert [row["level"] for row in json.loads(line)] == ["1", "2"]
    assert any("out tok/s" in text for text in table)


def test_bench_json_is_the_json_line_alone() -> None:
    with FakeServer() as server, FakeServer() as other:
        options = ["bench", "--url", server.url, "--vs", other.url, "--requests", "2", "--json"]
        done = runner.invoke(cli, options)
    assert [row["server"] for row in json.loads(done.stdout)] == [server.url, other.url]


def test_bench_fails_when_every_request_fails() -> None:
    with FakeServer(trouble="cut") as server:
        done = runner.invoke(cli, ["bench", "--url", server.url, "--requests", "2", "--warmup", "0"])
    assert done.exit_code == 1 and "2 × the stream ended without [DONE]" in done.stdout


def test_the_printed_python_lines_are_python() -> None:
    compile(python_lines("http://127.0.0.1:8000", "m"), "<printed>", "exec")


def test_stages_off_a_terminal_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(Console(stderr=True, force_terminal=False)) as stages:
        for text in ("downloading: 1 of 9", "downloading: 5 of 9", "starting [Ray]"):
            stages(text)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "· downloading: 1 of 9",
        "✓ downloading",
        "· starting [Ray]",
        "✓ starting [Ray]",
    ]


def test_stages_on_a_terminal_show_figures_in_place_and_tick_off(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(Console(stderr=True, force_terminal=True, width=80)) as stages:
        stages("downloading: [1] of 9")
        stages("starting")
    said = capsys.readouterr().err
    assert "downloading: [1] of 9" in said and "✓ downloading (" in said and "✓ starting (" in said


def test_a_stage_that_fails_is_not_ticked_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), Stages(Console(stderr=True, force_terminal=False)) as stages:
        stages("loading")
        raise ValueError
    assert "✓" not in capsys.readouterr().err


def test_a_package_from_elsewhere_is_told(tmp_path: Path) -> None:
    assert strangers() == []
    (line, *_) = strangers(tmp_path)
    assert str(tmp_path / "kvstore") in line and str(ROOT / "kvstore") in line


def test_the_command_starts_without_torch_or_ray() -> None:
    program = "import sys, deploy.__main__; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_quickstart_explains_itself_and_both_scripts_are_sound() -> None:
    done = subprocess.run([ROOT / "deploy" / "quickstart", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--kv-memory" in done.stdout
    for script in ("deploy/quickstart", "deploy/environment.sh", "tests/run", ".ci/run"):
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
    assert "./tests/run --all" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_shows_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "./deploy/quickstart" in text and "./tests/run" in text


def test_status_shows_what_a_real_coordinator_says(fake_app) -> None:
    app = fake_app("")
    found = {"service": "tidegate", "url": "http://here:1", **a_real_status()}
    app.status = lambda address, service: found
    shown = runner.invoke(cli, ["status"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for part in ("http://here:1", "g0", "up", "100 × 32", "4711", "72.0 MiB", "cpu", "smollm2-135m", "1/1"):
        assert part in shown.stdout, part
    as_json = runner.invoke(cli, ["status", "--json"])
    assert json.loads(as_json.stdout)["groups"][0]["group"] == "g0"


def test_status_watch_prints_frames_where_there_is_no_terminal(fake_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.watch.PERIOD_S", 0.01)
    app, asked = fake_app(""), []

    @contextmanager
    def watching(address: str | None, *, service: str | None):
        asked.append((address, service))
        yield lambda: {"service": "tidegate", "url": "http://here:1", **a_real_status()}

    app.watching = watching
    shown = runner.invoke(cli, ["status", "--watch", "--frames", "3", "--address", "a", "--service", "s"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("http://here:1") == 3 and asked == [("a", "s")]


@pytest.mark.parametrize("command", [["status"], ["status", "--watch"], ["status", "--json"]])
def test_status_without_a_service_is_a_message(fake_app, command: list[str]) -> None:
    from deploy.service import ServiceError

    def fail(*_: object, **__: object) -> None:
        raise ServiceError("no service runs on this machine")

    app = fake_app("")
    app.status = app.watching = fail
    done = runner.invoke(cli, command)
    assert done.exit_code == 1 and done.stderr.startswith("tidegate: no service runs")


def a_real_status() -> dict[str, Any]:
    """The status of a coordinator that one group has joined and reported to."""
    rank = RankCard(rank=0, pid=4711, node="here", threads=2, device="cpu", pool_bytes=72 * 2**20)
    card = GroupCard("g0", ("smollm2-135m",), "address", 100, 32, 8, 512, 4096, (rank,))
    coordinator = Coordinator(CoordinatorTerms(), first_epoch=1, seed=0)
    epoch = coordinator.join(card, 0.0)
    pool = PoolReport(total=100, free=90, held=7, idle=3, dirty=0, block_size=32)
    report = GroupReport("g0", epoch, 1, 1, pool, committed=7, running=1, waiting=0, waiting_tokens=0)
    coordinator.report(report, 0.5)
    return coordinator.status(1.0)


@pytest.mark.parametrize("several", [False, True])
def test_serve_starts_one_or_several_models(fake_app, tmp_path: Path, several: bool) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("models:\n  - model: a\n  - {model: b, groups: 2}\n" if several else "model: a\n")
    app = fake_app("http://here:1")
    done = runner.invoke(cli, ["serve", "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert app.configs[0].names == (("a", "b") if several else ("a",))
    refused = runner.invoke(cli, ["serve", "--config", str(config), "--groups", "3"])
    assert (refused.exit_code == 1) == several
    assert not several or "--groups: groups: stands beside models" in refused.stderr


def test_serve_with_keys_asks_nothing_and_shows_how_to_send_one(fake_app, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("api_keys_file: /keys\n")
    fake_app("http://here:1")
    done = runner.invoke(cli, ["serve", "--config", str(config), "--first-question"])
    assert done.exit_code == 0, done.output
    assert '-H "Authorization: Bearer $TIDEGATE_API_KEY"' in done.stdout
    compile(python_lines("http://here:1", "m", keyed=True), "<printed>", "exec")
    asked = runner.invoke(cli, ["serve", "--config", str(config), "--ask", "why?"])
    assert asked.exit_code == 1 and "wants API keys" in asked.stderr


def test_a_new_key_opens_the_file_that_holds_its_hash() -> None:
    key, digest = (line.split()[1] for line in runner.invoke(cli, ["keys", "new"]).stdout.splitlines())
    ring = KeyRing.read(f"tenants: [{{name: a, keys: ['{digest}']}}]", Tenant())
    found = ring.tenant_of(key, 0.0)
    assert found is not None and found.name == "a"
    assert runner.invoke(cli, ["keys", "hash"], input=f"{key}\n").stdout.strip() == digest
    assert runner.invoke(cli, ["keys", "new"]).stdout.split()[1] != key


def test_a_scenario_prints_its_phases_and_json(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ["--scenario", "overload", "--concurrency", "4", "--max-tokens", "8", "--key-file", str(key)]
    with FakeServer() as server:
        again = ["--vs", f"{server.url}#other", "--rounds", "2"]
        done = runner.invoke(cli, ["bench", "--url", f"{server.url}#mine", *options, *again], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["level"] for row in rows] == ["overload: interactive", "overload: batch"] * 4
    assert [row["server"].partition("#")[2] for row in rows[::2]] == ["mine", "other"] * 2
    assert {body["model"] for body in server.asked} == {"mine", "other"}
    assert "secret" not in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--scenario", "overload", "--seconds", "3"], "--seconds: scenario overload has no such setting"),
        (["--key-file", "/nowhere/key"], "/nowhere/key: cannot be read"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(options: list[str], says: str) -> None:
    done = runner.invoke(cli, ["bench", *options])
    assert done.exit_code == 1 and says in done.stderr


def test_a_probe_watches_the_service_at_the_targets_url(fake_app) -> None:
    app, urls = fake_app(""), []

    @contextmanager
    def watching(address: str | None = None, *, service: str | None = None, url: str | None = None):
        urls.append(url)
        yield lambda: {"service": "tidegate", "url": url, **a_real_status()}

    app.watching = watching
    options = ["--scenario", "overload", "--concurrency", "2", "--max-tokens", "8", "--probe", "--json"]
    with FakeServer() as server:
        done = runner.invoke(cli, ["bench", "--url", server.url, "--model", "smollm2-135m", *options])
    assert done.exit_code == 0, done.output
    (note,) = json.loads(done.stdout.splitlines()[0])
    assert urls == [server.url] and note["held"] == 0.07 and note["levels"] == {"normal": 1.0}
