"""`tidegate doctor`: what it calls an orphan, what it warns of, and that it never takes what a service owns."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy import doctor, survey
from deploy.__main__ import cli
from deploy.cluster import RayLink, remember
from deploy.config import ClusterConfig, Environment
from deploy.doctor import Finding, Need, Verdict
from deploy.inventory import YOUNG_S, Coordinator, Inventory, Orphan, Place, Rank, headless, orphans
from tests.statuses import a_row, a_status
from workers.native.build import NativeUnavailable

OLD = YOUNG_S + 1
OURS = ("ingress", "group")
REPLICA = "SERVE_REPLICA::tidegate#group#abc12345"


def inventory(**changes: Any) -> Inventory:
    """A healthy service, with `changes`."""
    facts: dict[str, Any] = {
        "address": "here:1",
        "coordinators": (Coordinator("tidegate", OLD, 1),),
        "ranks": (Rank("tidegate-abc12345-1-rank0", OLD),),
        "places": (Place("01", REPLICA), Place("02", "somebody's own"), Place("03", "SERVE_REPLICA::other#f#x")),
        "replicas": frozenset({REPLICA, "SERVE_REPLICA::tidegate#ingress#def"}),
        "applications": {"tidegate": OURS, "other": ("f",)},
    }
    return Inventory(**(facts | changes))


def test_a_healthy_service_has_no_orphans() -> None:
    assert not list(orphans(inventory())) and not headless(inventory())
    (finding,) = doctor.check_orphans(inventory())
    assert finding.verdict is Verdict.OK and "tidegate" in finding.text


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (
            {"applications": {}, "replicas": frozenset(), "coordinators": (Coordinator("tidegate", OLD, 0),)},
            ["coordinator", "rank", "place"],
        ),
        ({"coordinators": (Coordinator("tidegate", OLD, 1), Coordinator("x", OLD, None))}, ["coordinator"]),
        ({"ranks": (Rank("tidegate-zzz-1-rank0", OLD),)}, ["rank"]),
        ({"replicas": frozenset(), "applications": {}, "coordinators": ()}, ["rank", "place"]),
        ({"applications": {"other": ("f",)}, "coordinators": (), "replicas": frozenset({REPLICA})}, []),
    ],
    ids=["service gone", "second coordinator", "rank without owner", "everything gone", "replica still ends"],
)
def test_what_nobody_owns_is_an_orphan(changes: dict[str, Any], kinds: list[str]) -> None:
    found = list(orphans(inventory(**changes)))
    assert [orphan.kind for orphan in found if orphan.removable] == kinds
    assert not any(orphan.key in ("02", "03") for orphan in found), "somebody else's"


@pytest.mark.parametrize(
    "changes",
    [
        {"coordinators": (Coordinator("tidegate", OLD, 1), Coordinator("starting", 5.0, 0))},
        {"coordinators": (Coordinator("llm", OLD, 0),)},
        {"ranks": (Rank("tidegate-new-1-rank0", 5.0),)},
    ],
    ids=["starting", "application under another name", "rank that comes up"],
)
def test_what_may_be_owned_is_left_alone(changes: dict[str, Any]) -> None:
    found = list(orphans(inventory(**changes)))
    assert found and not any(orphan.removable for orphan in found)
    verdicts = {finding.verdict for finding in doctor.check_orphans(inventory(**changes)) if finding.topic == "orphans"}
    assert Verdict.WARN in verdicts


@pytest.mark.parametrize(
    ("coordinators", "missing"),
    [
        ((), ["tidegate"]),
        ((Coordinator("other", OLD, 0),), ["tidegate"]),
        ((Coordinator("llm", OLD, 2),), []),  # an application may be called otherwise than its service
    ],
)
def test_an_application_without_coordinator_fails(coordinators: tuple[Coordinator, ...], missing: list[str]) -> None:
    found = inventory(coordinators=coordinators)
    assert headless(found) == missing
    failed = [finding.text for finding in doctor.check_orphans(found) if "no coordinator" in finding.text]
    assert len(failed) == len(missing)


def test_without_a_ray_there_is_nothing_to_find() -> None:
    assert [finding.verdict for finding in doctor.check_orphans(None)] == [Verdict.OK]


@pytest.mark.parametrize(
    ("fault", "served", "verdict"),
    [
        (None, [], Verdict.OK),
        ("cannot listen", ["http://127.0.0.1:8000"], Verdict.OK),
        ("cannot listen", ["http://127.0.0.1:80"], Verdict.FAIL),
    ],
)
def test_a_port_may_be_taken_by_ourselves_alone(fault: str | None, served: list[str], verdict: Verdict) -> None:
    assert doctor.check_port("127.0.0.1", 8000, fault, served).verdict is verdict


GIB = 2**30


def need(**changes: Any) -> Need:
    facts: dict[str, Any] = {"model": "m", "ranks": 2, "tensor_parallel_size": 2, "threads": 1, "weights": GIB}
    return Need(**(facts | {"pool": GIB, "share": 0.25} | changes))


@pytest.mark.parametrize(
    ("needs", "available", "verdicts"),
    [
        ([need()], 16 * GIB, [Verdict.OK]),
        ([need()], 2 * GIB, [Verdict.WARN]),  # other programs have it
        ([need(pool=7 * GIB)], 16 * GIB, [Verdict.WARN]),  # 16 with a process each: too tight
        ([need(pool=8 * GIB)], 16 * GIB, [Verdict.FAIL]),
        ([need(), need(pool=7 * GIB)], 16 * GIB, [Verdict.FAIL]),
        ([need(pool=None)], 16 * GIB, [Verdict.OK]),
        ([need(pool=None, weights=4 * GIB)], 16 * GIB, [Verdict.FAIL, Verdict.OK]),
        ([need(weights=None)], 16 * GIB, [Verdict.WARN, Verdict.OK]),
    ],
)
def test_memory_is_added_up_over_models_and_ranks(needs: list[Need], available: int, verdicts: list[Verdict]) -> None:
    found = doctor.check_memory(needs, 17 * GIB, available)
    assert [finding.verdict for finding in found] == verdicts
    assert all(finding.todo for finding in found if finding.verdict is not Verdict.OK)


@pytest.mark.parametrize(("threads", "verdict"), [(2, Verdict.OK), (3, Verdict.WARN)])
def test_more_threads_than_cores_are_a_warning(threads: int, verdict: Verdict) -> None:
    assert doctor.check_threads(threads, 2, "config").verdict is verdict


def test_threads_are_added_up_by_node() -> None:
    status = a_status(a_row("g0"), a_row("g1"))
    assert doctor.threads_by_node(status) == {"here": 8}


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        ([a_row()], [Verdict.OK]),
        ([a_row(), a_row("g1", state="lapsed")], [Verdict.WARN]),
        ([a_row(state="stalled"), a_row("g1", state="leaving")], [Verdict.WARN] * 2),
    ],
)
def test_groups_that_are_not_up_are_named(rows: list[dict[str, Any]], verdicts: list[Verdict]) -> None:
    found = doctor.check_groups(a_status(*rows))
    assert [finding.verdict for finding in found] == verdicts
    assert all(row["group"] in str(found) for row in rows if row["state"] != "up")


@pytest.mark.parametrize(
    ("names", "variant", "fault", "verdict", "says"),
    [
        (["auto"], "avx2", None, Verdict.OK, "native-avx2 for Some CPU"),
        (["auto"], "plain", None, Verdict.OK, "oneDNN: Some CPU has neither"),
        (["native-plain"], "avx2", None, Verdict.OK, "native-plain for Some CPU"),
        (["torch", "onednn"], "avx2", None, Verdict.OK, "onednn, torch, as configured"),
        (["auto", "torch"], "avx2", "no compiler", Verdict.WARN, "cannot be had: no compiler; oneDNN computes"),
        (["auto", "native"], "avx2", "no compiler", Verdict.FAIL, "cannot be had: no compiler"),
    ],
)
def test_what_would_compute_is_told_with_the_reason(
    names: list[str], variant: str, fault: str | None, verdict: Verdict, says: str
) -> None:
    finding = doctor.check_kernels(names, "Some CPU", variant, fault)
    assert finding.verdict is verdict and says in finding.text
    assert bool(finding.todo) is (verdict is not Verdict.OK)


def test_what_ranks_compute_with_is_told_once_per_kind() -> None:
    slow = {"kernel": "onednn-fp32", "kernel_why": "no C++ compiler"}
    rows = a_row("g0"), a_row("g1"), a_row("g2", ranks=[a_row()["ranks"][0] | slow])
    first, second = doctor.check_computing(a_status(*rows))
    assert first.text == "tidegate computes with native-avx2: the fastest for this CPU"
    assert second.text == "tidegate computes with onednn-fp32: no C++ compiler"


def test_doctor_compiles_the_kernels_or_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def refuse(folder: Path, *_: object) -> None:
        asked.append(folder)
        raise NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(survey, "built", refuse)
    environment = Environment(tmp_path)
    finding = survey._kernels(ClusterConfig(), environment)
    assert asked == [tmp_path / "native"] and "no C++ compiler" in finding.text
    survey._kernels(ClusterConfig(kernels="torch"), environment)
    assert len(asked) == 1


ASKS = [
    "ray[serve]<2.61,>=2.60",
    "torch>=2.13",
    "gone>=1",
    "elsewhere>=1; sys_platform == 'win32'",
    "x>=9; extra == 't'",
]


def test_versions_are_held_against_what_is_asked_for() -> None:
    installed = {"ray": "2.61.0", "torch": "2.13.0+cpu"}
    found = doctor.check_versions(ASKS, installed, "3.11.7", [])
    assert [finding.text.split()[0] for finding in found] == ["ray", "gone"]
    assert not doctor.is_well(found)
    fine = doctor.check_versions(ASKS, installed | {"ray": "2.60.1", "gone": "1.0"}, "3.11.7", [])
    assert [finding.verdict for finding in fine] == [Verdict.OK]


@pytest.mark.parametrize(("python", "strangers"), [("3.10.1", []), ("3.12.0", ["`import cluster` finds another"])])
def test_an_old_python_and_strange_packages_fail(python: str, strangers: list[str]) -> None:
    assert not doctor.is_well(doctor.check_versions([], {}, python, strangers))


def test_nodes_must_have_the_same_versions() -> None:
    same = {"a": {"ray": "1", "torch": "2"}, "b": {"ray": "1", "torch": "2"}}
    assert doctor.is_well(doctor.check_nodes(same))
    (finding,) = doctor.check_nodes(same | {"c": {"ray": "1", "torch": "3"}})
    assert finding.verdict is Verdict.FAIL and "2 on a, b; 3 on c" in finding.text


def test_the_table_ends_with_the_worst_and_shows_brackets_as_they_are() -> None:
    findings = [Finding("x", verdict, f"{verdict.value} [red]", "do [this]") for verdict in reversed(Verdict)]
    out = Console(file=io.StringIO(), width=120, color_system=None)
    out.print(doctor.findings_table(findings))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("ok [red]") < text.index("warn [red]") < text.index("fail [red]")


# -- the command, without a Ray ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of its own: no notes, no folders, no Ray."""
    monkeypatch.setenv("TIDEGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(survey.Environment, "read", classmethod(lambda cls: cls(tmp_path / "cache")))
    monkeypatch.setattr(survey, "abandoned", lambda: [])

    def no_ray(*_: object) -> RayLink:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(survey, "connect_ray", no_ray)
    (tmp_path / "cache" / "run").mkdir(parents=True)
    return tmp_path


def run(*options: str) -> Any:
    return CliRunner().invoke(cli, ["doctor", *options], env={"COLUMNS": "250"})


def config(folder: Path, port: int, **keys: str) -> str:
    path = folder / "c.yaml"
    path.write_text("\n".join([f"port: {port}", "kv_memory: 1MiB", *(f"{k}: {v}" for k, v in keys.items())]))
    return str(path)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_it_works_where_no_ray_runs(alone: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = run("--config", config(alone, port))
    assert done.exit_code == 0, done.output
    assert "no Ray runs here" in done.stdout and f"127.0.0.1:{port} is free" in done.stdout


def test_a_failure_is_the_exit_status(alone: Path, taken: int) -> None:
    done = run("--config", config(alone, taken, api_keys_file="/nowhere/keys"))
    assert done.exit_code == 1
    assert "cannot listen" in done.stdout and "api_keys_file: /nowhere/keys cannot be read" in done.stdout


def test_a_config_that_is_wrong_is_a_message(alone: Path) -> None:
    done = run("--config", config(alone, 0))
    assert done.exit_code == 1 and "port" in done.stderr and "Traceback" not in done.output


def test_what_killed_launchers_left_is_told_and_removed(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = remember(RayLink("127.0.0.1:1"), alone / "cache" / "run", "dead", "http://127.0.0.1:1")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"pid": 2**31 - 1}))
    folder = alone / "tidegate-left"
    folder.mkdir()
    monkeypatch.setattr(survey, "abandoned", lambda: [folder] if folder.exists() else [])
    assert all(str(path) in run().stdout for path in (note, folder)) and folder.exists()
    assert "2 removed" in run("--fix").stdout
    assert not note.exists() and not folder.exists()


@pytest.mark.parametrize("fix", [False, True])
def test_fix_removes_orphans_and_nothing_else(alone: Path, monkeypatch: pytest.MonkeyPatch, fix: bool) -> None:
    removed: list[Orphan] = []

    @contextmanager
    def some_ray(*_: object) -> Iterator[tuple[str, str]]:
        yield "here:1", ""

    found = inventory(
        coordinators=(Coordinator("tidegate", OLD, 1), Coordinator("dead", OLD, 0), Coordinator("new", 1.0, 0)),
        ranks=(Rank("tidegate-abc12345-1-rank0", OLD), Rank("dead-xyz-1-rank0", OLD)),
    )
    monkeypatch.setattr(survey, "_ray", some_ray)
    monkeypatch.setattr(survey, "_statuses", lambda: {"tidegate": a_status()})
    monkeypatch.setattr(survey, "_inventory", lambda *_: found)
    monkeypatch.setattr(survey, "_node_cores", lambda: {"here": 2})
    monkeypatch.setattr(survey, "_node_versions", lambda: {"here": {"ray": "1"}})
    monkeypatch.setattr(survey, "_remove", removed.append)
    done = run(*(["--fix"] if fix else []))
    assert [orphan.key for orphan in removed] == (["dead", "dead-xyz-1-rank0"] if fix else [])
    assert ("removed: coordinator of dead" in done.stdout) == fix
    assert "node here: 4 threads of ranks on 2 physical cores" in done.stdout
    assert "so it may be starting" in done.stdout and (done.exit_code == 0) == fix
