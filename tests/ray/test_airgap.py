"""A start with no way out: in a network of its own, of which nothing leads anywhere, `tidegate serve` comes up with a
local model and answers. What it had to download first it would miss here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ray.launch import serving

pytestmark = pytest.mark.slow

ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
ANSWERED = "tokens, over HTTP from http://127.0.0.1:"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where no such network can be made; nobody is told that there is no hub."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare and ip are not installed")
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"no network of one's own here: {tried.stderr.strip()}")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("offline")
def test_a_service_starts_and_answers_without_a_way_out(folder: Path, tiny_model: Path) -> None:
    with serving(folder, tiny_model, "--ask", "What is a tide gate?", through=ALONE) as (process, _):
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if ANSWERED in line:
                break
        else:
            pytest.fail("".join(said))
        network = Path(f"/proc/{process.pid}/net")
        assert [line.split(":")[0].strip() for line in (network / "dev").read_text().splitlines()[2:]] == ["lo"]
        assert len((network / "route").read_text().splitlines()) == 1, "a heading and no route"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) in (0, 130)
