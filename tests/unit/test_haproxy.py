"""What the wrapper around HAProxy makes of Serve's configuration, and what happens where HAProxy does not run."""

from __future__ import annotations

import logging
import re
import resource
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from deploy import haproxy
from deploy.haproxy import fits, prepare_haproxy


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for HAProxy: prints its words, one per line."""
    path = tmp_path / "it's one"
    path.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    path.chmod(0o700)
    monkeypatch.setattr(haproxy, "_program", lambda: str(path))
    return path


def test_pages_of_statistics_move_to_sockets_and_all_else_stays(tmp_path: Path, program: Path) -> None:
    environment = prepare_haproxy(tmp_path / "h")
    node = tmp_path / "h" / "node"
    node.mkdir()
    written = HAPROXY_CONFIG_TEMPLATE.replace("{{ config.metrics_port }}", "9101")
    written = written.replace("{{ config.stats_port }}", "8404")
    written = written.replace("{{ config.frontend_host }}:{{ config.frontend_port }}", "127.0.0.1:8000")
    config = node / "haproxy.cfg"
    config.write_text(written)
    wrapper = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    words = ["-db", "-f", str(config), "-sf", "17", "a b"]
    said = subprocess.run([wrapper, *words], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == words
    binds = re.findall(r"^ *bind (.*)$", config.read_text(), re.MULTILINE)
    assert binds[:2] == [f"unix@{node}/p", "127.0.0.1:8000"] and binds[-1] == f"unix@{node}/s"
    changed = [
        new for old, new in zip(written.splitlines(), config.read_text().splitlines(), strict=True) if old != new
    ]
    assert len(changed) == 2


def test_everything_of_it_lies_in_its_folder(tmp_path: Path, program: Path) -> None:
    folder = tmp_path / "h"
    environment = prepare_haproxy(folder)
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1" and folder.stat().st_mode & 0o777 == 0o700
    paths = {name: value for name, value in environment.items() if not value.isdigit()}
    assert all(Path(value).is_relative_to(folder) for value in paths.values())
    from ray.serve._private import constants

    known = {name for name in vars(constants) if "HAPROXY" in name and isinstance(getattr(constants, name), str)}
    elsewhere = {name for name in known if str(getattr(constants, name)).startswith("/tmp")}
    assert elsewhere <= set(paths), "Serve has another file of HAProxy's"


def test_where_it_does_not_run_serve_s_own_proxy_stays(
    tmp_path: Path, program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program.write_text("#!/bin/sh\nexit 3\n")
    with caplog.at_level(logging.WARNING):
        assert prepare_haproxy(tmp_path / "h") == {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    assert "Serve's own proxy takes the requests" in caplog.text


@pytest.mark.parametrize(
    ("files", "clients"), [(1024, 412), (8392, 4096), (1_048_576, 4096), (resource.RLIM_INFINITY, 4096), (64, 1)]
)
def test_no_more_clients_than_open_files_allow(files: int, clients: int) -> None:
    assert haproxy._connections(files) == clients


def test_ray_brings_the_program_along() -> None:
    done = subprocess.run([haproxy._program(), "-v"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("HAProxy version")


def test_sockets_must_have_names_that_haproxy_takes() -> None:
    assert fits(Path("/tmp/tt-12345678/t/tidegate-12345678/h")) and not fits(
        Path("/var/folders/zz/0123456789/T/tidegate-12345678/h")
    )
    longest = Path("/tmp/tt-12345678/t/tidegate-12345678/h") / ("n" * haproxy._NODE) / "a"
    assert len(str(longest)) == 97
