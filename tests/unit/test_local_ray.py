"""What is written down about a Ray of our own: its token, and where a service runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cluster import RayLink, make_token, recall, remember, sweep

LINK = RayLink("127.0.0.1:6379", "/somewhere", "/somewhere/token")


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    return int(done.stdout)


def test_a_token_is_for_its_owner_alone_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run" / "token"
    make_token(path)
    first = path.read_text()
    make_token(path)
    assert len(first) == 64 and path.read_text() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_running_service_is_found_by_its_name_or_as_the_only_one(tmp_path: Path) -> None:
    remember(LINK, tmp_path, "tidegate", "http://127.0.0.1:8000")
    for service in ("tidegate", None):
        note = recall(tmp_path, service)
        assert note is not None and note.link == LINK and note.url == "http://127.0.0.1:8000"
    assert recall(tmp_path, "another") is None


def test_what_a_dead_process_or_another_version_left_is_no_service(tmp_path: Path, gone: int) -> None:
    note = remember(LINK, tmp_path, "tidegate", "http://127.0.0.1:8000")
    found = json.loads(note.read_text())
    note.write_text(json.dumps(found | {"pid": gone}))
    assert recall(tmp_path) is None
    note.write_text(json.dumps({"pid": os.getpid(), "link": {"unknown": 1}, "url": ""}))
    assert recall(tmp_path) is None
    note.write_text("{")
    assert recall(tmp_path) is None


def test_only_folders_whose_owner_is_gone_are_swept(tmp_path: Path, gone: int) -> None:
    for name, owner in {"tidegate-dead": gone, "tidegate-alive": os.getpid(), "other": gone}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "pid").write_text(str(owner))
    (tmp_path / "tidegate-logs").mkdir()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tidegate-alive", "tidegate-logs", "other"}
