"""A contest of servers that the benchmark starts itself: in turns, each anew, nothing left behind; its standings."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.bench import standings
from deploy.bench.busy import Process, cores, family
from deploy.bench.client import Sample, ServerError
from deploy.bench.contest import Contest
from deploy.bench.figures import Figures
from deploy.bench.servers import StartedServer, answers, command_words, counters
from deploy.bench.standings import Range, Turn
from deploy.bench.versus import CLIENT, play
from deploy.config import ConfigError
from tests.fake_server import FakeServer

PROGRAM = Path(__file__).resolve().parents[1] / "fake_server.py"
SHORT = {"requests": 2, "prompt_words": 4, "max_tokens": 8, "warmup": 1}
runner = CliRunner()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def served(*trouble: str) -> tuple[str, str]:
    """A command that starts a fake server, and its URL."""
    port = free_port()
    return shlex.join([sys.executable, str(PROGRAM), str(port), *trouble]), f"http://127.0.0.1:{port}"


def contender(name: str, **rest: Any) -> dict[str, Any]:
    start, url = served(*rest.pop("trouble", ()))
    return {"name": name, "start": start, "url": url, **rest}


def contest(*servers: dict[str, Any], loads: list[dict[str, Any]] | None = None) -> Contest:
    return Contest.model_validate({"servers": list(servers), "loads": loads or [{"name": "l", "levels": [1], **SHORT}]})


def run(wanted: Contest, starts: int = 1, **rest: Any) -> list[Turn]:
    turns: list[Turn] = []
    options = {"tick": lambda *_: None, "said": turns.append, "watch": unwatched, **rest}
    play(wanted, here=Path("/"), starts=starts, **options)
    return turns


def unwatched(url: str) -> Any:
    raise AssertionError(f"nobody asked to look at {url}")


def test_servers_take_turns_each_started_anew() -> None:
    loads = [
        {"name": "sweep", "levels": [1, 2], **SHORT},
        {"name": "prefix", "levels": [2], "shared_words": 5, **SHORT},
    ]
    one, other = contender("one", counters=["asked_total"]), contender("other")
    turns = run(contest(one, other, loads=loads), starts=2)
    names = ["sweep, 1", "sweep, 2", "prefix"]
    assert [(turn.start, turn.server, turn.load) for turn in turns] == [
        (start, server, name) for start in (1, 2) for server in ("one", "other") for name in names
    ]
    assert [turn.figures.requests for turn in turns] == [2, 4, 4] * 4, "so many per client"
    # A fresh process has counted nothing; the warm-up is over before the first look.
    assert [turn.counted for turn in turns[:3]] == [{"asked_total": 2.0}, {"asked_total": 4.0}, {"asked_total": 4.0}]
    assert turns[0].counted == turns[6].counted and turns[3].counted == {}
    assert all({CLIENT, "fake_server.py"} <= turn.cores.keys() for turn in turns)
    assert not answers(one["url"]) and not answers(other["url"])


def test_a_tidegate_is_asked_what_it_computed_twice() -> None:
    looks = iter([(100, 10, 1), (300, 60, 4)])
    asked = []

    @contextmanager
    def watch(url: str) -> Iterator[Any]:
        asked.append(url)

        def look() -> dict[str, Any]:
            computed, again, preempted = next(looks)
            row = {"group": "g", "models": ["stand-in"], "blocks": 8, "committed": 1, "pool": {"held": 1}}
            row |= {"computed_tokens": computed, "recomputed_tokens": again, "preemptions": preempted}
            return {"groups": [row]}

        yield look

    server = contender("ours", reports=True)
    (turn,) = run(contest(server), watch=watch)
    assert asked == [server["url"]]
    assert turn.counted == {"preemptions": 3, "recomputed": 0.25}


def test_a_server_that_does_not_come_up_says_why() -> None:
    with pytest.raises(ServerError, match=r"(?s)ended with status 1:.*no such model: x"):
        run(contest(contender("x", trouble=("ends",))))


def test_a_server_that_says_it_is_not_well_does_not_count_as_up() -> None:
    with FakeServer() as well, FakeServer(trouble="never well") as ill:
        assert answers(well.url) and not answers(ill.url)


def test_a_server_that_never_answers_is_ended() -> None:
    command = shlex.join([sys.executable, "-c", "import time; print('at it', flush=True); time.sleep(600)"])
    server = StartedServer(command, f"http://127.0.0.1:{free_port()}", here=Path("/"), ready_s=5.0)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)no answer after 5 s.*at it"):
        server.__enter__()
    assert time.monotonic() - began < 60
    with pytest.raises(AssertionError, match="not started"):
        server.pid  # noqa: B018 - it has none any more


def test_what_a_server_leaves_behind_is_ended_with_it() -> None:
    """A server whose first process ignores SIGTERM and has a child."""
    start, url = served()
    script = "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script += f"subprocess.run({shlex.split(start)!r})"
    with StartedServer(shlex.join([sys.executable, "-c", script]), url, here=Path("/"), stop_s=0.5) as server:
        mine = family(server.pid)
        assert len(mine) == 2
    until = time.monotonic() + 20  # a killed process takes a moment to go
    while any(map(lives, mine)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(lives, mine))


def lives(pid: int) -> bool:
    """A process that has ended, and is only still listed, has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_port_that_is_taken_is_not_measured_by_mistake() -> None:
    start, url = served()
    with StartedServer(start, url, here=Path("/")), pytest.raises(ServerError, match="a server is there already"):
        StartedServer(start, url, here=Path("/")).__enter__()


def test_a_command_is_words_with_three_shorthands() -> None:
    assert command_words("tidegate serve --config {here}/a.yaml", Path("/x")) == [
        *(sys.executable, "-m", "deploy", "serve", "--config", "/x/a.yaml")
    ]
    assert command_words("env A='b c' ~/bin/python -m m", Path("/x")) == [
        *("env", "A=b c", os.path.expanduser("~/bin/python"), "-m", "m")
    ]
    assert command_words("env A=1 B=2 tidegate serve", Path("/x")) == [
        *("env", "A=1", "B=2", sys.executable, "-m", "deploy", "serve")
    ]
    with pytest.raises(ServerError, match="No closing quotation"):
        command_words("a 'b", Path("/x"))
    with pytest.raises(ServerError, match="cannot be run"):
        StartedServer("/no/such/program", "http://127.0.0.1:9", here=Path("/")).__enter__()


def test_counters_are_summed_over_their_labels() -> None:
    start, url = served()
    with StartedServer(start, url, here=Path("/")):
        assert counters(url, ("asked_total", "absent")) == {"asked_total": 0.0, "absent": 0.0}
        assert counters(url, ()) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("servers: []", "servers: "),
        ("servers: [{name: a, url: x, start: y}]\nloads: [{name: l, levels: [1]}]", "servers[0].url: "),
        ("servers: [{name: a, url: 'http://x', start: y, port: 3}]\nloads: [{name: l, levels: [1]}]", "unknown key"),
        ("servers: [{name: a, url: 'http://x', start: y}]\nloads: [{name: l, levels: [0]}]", "loads[0].levels[0]: "),
        (
            "servers: [{name: a, url: 'http://x', start: y}, {name: a, url: 'http://x', start: y}]\n"
            "loads: [{name: l, levels: [1]}]",
            "two entries have one name",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "contest.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Contest.read(path)
    assert says in str(refused.value) and str(path) in str(refused.value)


def test_loads_of_one_contest_ask_different_things() -> None:
    wanted = contest({"name": "a", "url": "http://x", "start": "y"}, loads=[{"name": "l", "levels": [2, 4]}])
    (load,) = wanted.loads
    asked = [load.load(level, seed=7, timeout_s=1.0, key="k") for level in (0, 1)]
    assert [(each.levels, each.requests, each.key) for each in asked] == [((2,), 8, "k"), ((4,), 16, "k")]
    texts = [{task.steps[0].prompt for task in each.tasks(0)} for each in asked]
    assert not texts[0] & texts[1]


def figures(tokens: float, ttft: float, failed: int = 0) -> Figures:
    good = [Sample(ttft=ttft, total=1.0, decode=0.9, output_tokens=int(tokens))] if tokens else []
    return Figures.of("s", "1", [*good, *[Sample(error="no")] * failed], 1.0)


def test_standings_are_medians_and_ratios_are_of_one_turn() -> None:
    ours, theirs = (100, 300, 200), (50, 100, 200)
    turns = []
    for start, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        turns += [Turn("a", "l", start, figures(a, 0.1), {"engine": 0.5 * start}, {"lost": start})]
        turns += [Turn("b", "l", start, figures(b, 0.1 * start, failed=1))]
    first, second = standings.standings(turns)
    assert (first.server, first.output_tok_s, first.failed) == ("a", Range(200, 100, 300), 0)
    assert (second.server, second.output_tok_s, second.failed) == ("b", Range(100, 50, 200), 3)
    assert first.cores == {"engine": 1.0} and first.counted == {"lost": 2}
    (ratio,) = standings.ratios(turns, "a")
    assert ratio.output_tok_s == Range(2.0, 1.0, 3.0), "turn by turn, not median by median"
    assert ratio.ttft_ms is not None and ratio.ttft_ms.median == pytest.approx(0.5)
    assert ratio.text() == "l: a against b: output tokens/s 2.00 (1.00-3.00) ×, TTFT p50 0.50 (0.33-1.00) ×"
    assert standings.remarks([first]) == ["l, a: cores: engine 1.00; lost 2"]
    said = json.loads(json.dumps(standings.as_json(turns, "a")))
    assert [row["output_tok_s"]["median"] for row in said["standings"]] == [200, 100] and len(said["turns"]) == 6


def test_a_server_that_answered_nothing_stands_without_figures() -> None:
    turns = [Turn("a", "l", 1, figures(10, 0.1)), Turn("b", "l", 1, figures(0, 0.1, failed=4))]
    assert [row.output_tok_s is None for row in standings.standings(turns)] == [False, True]
    assert standings.ratios(turns, "a") == []
    standings.standings_table(standings.standings(turns))


def test_cores_count_what_is_there_now() -> None:
    before = {1: Process(1, 0, 1, "a", 10.0), 2: Process(2, 1, 1, "b", 5.0), 3: Process(3, 1, 1, "gone", 5.0)}
    after = {1: Process(1, 0, 1, "a", 11.0), 2: Process(2, 1, 1, "b", 9.0), 4: Process(4, 1, 1, "a", 1.0)}
    assert cores(before, after, 2.0) == {"b": 2.0, "a": 1.0}


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        ("ray::RankActor.drive\0", "ray::RankActor"),
        ("VLLM::EngineCore\0", "VLLM::EngineCore"),
        ("/usr/bin/python3\0-m\0vllm.entrypoints.api\0--port\0", "vllm.entrypoints.api"),
        ("python\0-u\0/a/serve.py\0x\0", "serve.py"),
        ("python3.11\0-c\0import x; x.main()\0", "python3.11"),
        ("/opt/raylet\0--port=1\0", "raylet"),
        ("", "(kernel)"),
    ],
)
def test_processes_are_called_what_they_call_themselves(tmp_path: Path, cmdline: str, name: str) -> None:
    for pid, parent, session in ((10, 1, 10), (11, 10, 11), (12, 1, 10), (13, 1, 13)):
        (tmp_path / str(pid)).mkdir()
        stat = f"{pid} (a) b) S {parent} 0 {session} 0 0 0 0 0 0 0 300 100 0 0"
        (tmp_path / str(pid) / "stat").write_text(stat)
        (tmp_path / str(pid) / "cmdline").write_text(cmdline)
    (tmp_path / "self").mkdir()
    found = family(10, tmp_path)
    assert found.keys() == {10, 11, 12}, "it, its child, its session; not its neighbour"
    assert {process.name for process in found.values()} == {name}
    assert found[10].seconds == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))


def test_the_command_prints_medians_ratios_and_one_json_line(tmp_path: Path) -> None:
    path = tmp_path / "contest.yaml"
    loads = [{"name": "l", "levels": [2], **SHORT}]
    path.write_text(json.dumps({"servers": [contender("ours"), contender("theirs")], "loads": loads}))
    done = runner.invoke(cli, ["bench", "--vs", str(path), "--rounds", "1"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert any(line.startswith("l: ours against theirs: output tokens/s ") for line in done.stdout.splitlines())
    assert "start 1, theirs: l: " in done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [turn["server"] for turn in said["turns"]] == ["ours", "theirs"]


def test_a_contest_that_is_cut_short_still_says_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "contest.yaml"
    loads = [{"name": "l", "levels": [1], **SHORT}]
    servers = [contender("ours"), contender("theirs", trouble=("ends",))]
    path.write_text(json.dumps({"servers": servers, "loads": loads}))
    done = runner.invoke(cli, ["bench", "--vs", str(path), "--json"])
    assert done.exit_code == 1 and "no such model: x" in done.stderr and "Traceback" not in done.output
    assert [row["server"] for row in json.loads(done.stdout)["standings"]] == ["ours"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--vs", "a.yaml", "--requests", "3"], "--requests: --vs FILE has no such option"),
        (["--vs", "a.yaml", "--vs", "http://x"], "stands alone"),
        (["--vs", "/nowhere/a.yaml"], "cannot be read"),
        (["--roofline", "--rate", "3"], "--rate: --roofline has no such option"),
        (["--roofline", "--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_message(options: list[str], says: str) -> None:
    done = runner.invoke(cli, ["bench", *options])
    assert done.exit_code == 1 and says in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize(
    "path", sorted((PROGRAM.parents[1] / "deploy" / "configs").glob("versus*.yaml")), ids=lambda p: p.stem
)
def test_the_shipped_contests_are_valid(path: Path) -> None:
    ours, theirs = Contest.read(path).servers
    assert command_words(ours.start, path.parent)[:4] == [sys.executable, "-m", "deploy", "serve"] and ours.reports
    assert command_words(theirs.start, path.parent)[0] == "env" and theirs.counters
