"""Task files, the sandbox that runs answers, and examinations of a server."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.quality.sandbox import isolation, passes
from deploy.quality.tasks import TaskError, letter_of, number_of, read_task
from tests.fake_server import FakeServer

GSM8K = [
    {"question": f"{n} hens lay {n} eggs each. How many eggs?", "answer": f"{n} * {n} = {n * n}\n#### {n * n:,}"}
    for n in (2, 3, 40, 5)
]
HUMANEVAL = [
    {
        "prompt": f'def add{n}(x):\n    """x and {n}."""\n',
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        "entry_point": f"add{n}",
    }
    for n in range(3)
]
MMLU = """What is wet?,"Sand, dry",Water,Salt,Wood,B
"Which is ""round""?",A box,A ball,A rod,A pin,B
Two and two?,1,2,3,4,D
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"gsm8k": tmp_path / "g.jsonl", "humaneval": tmp_path / "h.jsonl.gz", "mmlu": tmp_path / "m.csv"}
    found["gsm8k"].write_text("\n".join(map(json.dumps, GSM8K)) + "\n\n")
    found["humaneval"].write_bytes(gzip.compress("\n".join(map(json.dumps, HUMANEVAL)).encode()))
    found["mmlu"].write_text(MMLU)
    return found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 * 4 = 16\n#### 1,600", "1600"),
        ("so it is 12, not 13.", "13"),
        ("$ 3.50 in all", "3.5"),
        ("7.00", "7"),
        ("#### -5 degrees, or 9", "-5"),
        ("half: .5", "0.5"),
        ("none at all", None),
        ("#### nothing, 3 before", "3"),
    ],
)
def test_the_number_that_an_answer_comes_to(text: str, number: str | None) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(("text", "letter"), [(" B", "B"), ("(C) since A", "C"), ("Because D.", "D"), ("none", None)])
def test_the_letter_of_a_reply(text: str, letter: str | None) -> None:
    assert letter_of(text) == letter


def test_examples_stand_before_a_question_and_are_not_asked(files: dict[str, Path]) -> None:
    task = read_task("gsm8k", files["gsm8k"], shots=1)
    assert len(task.prompts) == 3
    assert task.prompts[0].startswith("Question: 2 hens lay 2 eggs each. How many eggs?\nAnswer: 2 * 2 = 4\n#### 4\n\n")
    assert task.prompts[0].endswith("Question: 3 hens lay 3 eggs each. How many eggs?\nAnswer:")
    assert task.questions[1].grade("40 * 40 = 1600") and not task.questions[1].grade("160")
    assert len(read_task("gsm8k", files["gsm8k"], shots=1, limit=2).prompts) == 2


def test_choices_are_lettered(files: dict[str, Path]) -> None:
    task = read_task("mmlu", files["mmlu"], shots=0)
    assert task.prompts[1] == 'Which is "round"?\nA. A box\nB. A ball\nC. A rod\nD. A pin\nAnswer:'
    assert [question.grade(" B") for question in task.questions] == [True, True, False]


def test_code_is_right_when_its_tests_pass(files: dict[str, Path]) -> None:
    task = read_task("humaneval", files["humaneval"])
    question = task.questions[2]
    assert question.grade("    return x + 2")
    assert not question.grade("    return x")
    assert not question.grade("    return (")
    assert not question.grade("    import sys; sys.exit(0)"), "leaving early is no success"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gsm8k", '{"question": "x"}', r"record 1 is none of gsm8k: KeyError\('answer'\)"),
        ("gsm8k", '{"question": "x", "answer": "9"}', "no number behind ####"),
        ("gsm8k", "{", "cannot be read as gsm8k"),
        ("mmlu", "q,a,b,c,d,E\n", "record 1 is none of mmlu"),
        ("mmlu", "q,a,b,c,A\n", "four choices"),
        ("humaneval", '{"prompt": "", "test": "", "entry_point": "x(1)"}', "is no name"),
        ("mmlu", "q,a,b,c,d,A\n", "has 1 questions"),
        ("arc", "", "known: gsm8k, humaneval, mmlu"),
    ],
)
def test_a_file_of_something_else_is_refused_by_record(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / "task").write_text(content)
    with pytest.raises(TaskError, match=says):
        read_task(name, tmp_path / "task", shots=0)
    with pytest.raises(TaskError):
        read_task(name, tmp_path / "nowhere")


def test_an_answer_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = f"import os, time\nopen({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')\ntime.sleep(60)"
    began = time.monotonic()
    found = passes(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nwhile True: pass", seconds=1
    )
    assert not found.passed and "1 s" in found.said
    assert time.monotonic() - began < 10
    if not isolation():  # the number is one of a namespace of processes otherwise, which is gone as a whole
        for pid in pids.read_text().split() if pids.exists() else ():
            assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(2**31)",
        "open('big', 'wb').write(bytes(2**23))",
        "files = [open('f' + str(n), 'w') for n in range(100)]",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "assert False",
        "\x00",
    ],
)
def test_what_goes_beyond_a_limit_or_leaves_early_fails(program: str) -> None:
    assert not passes(program).passed


def test_what_runs_to_its_end_passes_in_a_folder_of_its_own() -> None:
    assert passes("import os\nopen('here', 'w').write('x')\nassert os.listdir('.').count('here') == 1").passed
    assert passes(
        f"import os\nassert os.getcwd() != {os.getcwd()!r}\nassert 'SECRET' not in os.environ\nprint('said')"
    ).passed


@pytest.mark.skipif(not isolation(), reason="this system lets nobody take a process's network away")
def test_an_answer_has_no_network() -> None:
    with FakeServer() as server:
        port = int(server.url.rpartition(":")[2])
        assert not passes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)").passed
        assert not server.asked


def reply(body: dict[str, Any]) -> Sequence[str]:
    """Right about hens but for 5 of them; right about code; always B."""
    prompt = body["prompt"]
    if "hens" in prompt:
        hens = int(prompt.rpartition("Question: ")[2].split()[0])
        return ("It is ", "#### ", str(hens * hens if hens != 5 else 0))
    if "def add" in prompt:
        return ("    return", f" x + {prompt.partition('def add')[2][0]}")
    return (" B",)


def run(*options: str) -> Any:
    return CliRunner().invoke(cli, ["quality", *options])


def test_a_server_is_asked_and_its_right_replies_are_counted(files: dict[str, Path]) -> None:
    with FakeServer(reply=reply) as server:
        given = [f"{name}={path}" for name, path in files.items()]
        done = run("--url", server.url + "/v1", "--shots", "0", "--json", "--tasks", *given)
    assert done.exit_code == 0, done.output
    gsm8k, humaneval, mmlu = json.loads(done.output.splitlines()[-1])["tasks"]
    assert (gsm8k["task"], gsm8k["asked"], gsm8k["right"]["mean"]) == ("gsm8k", 4, 0.75)
    assert gsm8k["right"]["error"] == pytest.approx((0.75 * 0.25 / 3) ** 0.5)
    assert (humaneval["asked"], humaneval["right"]["mean"], mmlu["right"]["mean"]) == (3, 1.0, pytest.approx(2 / 3))
    assert server.at_once > 1
    body = server.asked[0]
    assert (body["temperature"], body["stop"], body["model"]) == (0, ["\nQuestion:"], "stand-in")
    assert "ignore_eos" not in body


def test_figures_for_people(files: dict[str, Path]) -> None:
    with FakeServer(reply=reply) as server:
        done = run("--url", server.url, "--shots", "0", "--limit", "2", "--tasks", f"mmlu={files['mmlu']}")
    assert done.exit_code == 0 and "mmlu" in done.output and "100.0±0.0%" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tasks", "gsm8k"], "write NAME=FILE"),
        (["--tasks", "arc=x"], "known: gsm8k, humaneval, mmlu"),
        (["--tasks", "gsm8k=/nowhere"], "cannot be read"),
        (["gsm8k=x"], "files of tasks stand behind --tasks"),
    ],
)
def test_what_cannot_be_asked_is_said(options: list[str], says: str) -> None:
    done = run(*options)
    assert done.exit_code == 1 and says in done.output


def test_a_server_that_answers_nothing_is_an_error(files: dict[str, Path]) -> None:
    with FakeServer(trouble="status") as server:
        done = run("--url", server.url, "--tasks", f"mmlu={files['mmlu']}", "--shots", "0")
    assert done.exit_code == 1 and "answered none of the questions of mmlu: 503" in done.output
