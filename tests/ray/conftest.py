"""One Ray, on loopback, for the whole folder; a tiny random model in two groups on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # before anything imports ray

from deploy.cluster import start_ray, stop_ray
from deploy.config import ClusterConfig
from tests.ray.stage import Stage, command_line, free_port, processes, write_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("run")
    stage = Stage(start_ray(home / "token", cpus=2), home)
    yield stage
    if stage.service is not None:
        stage.service.close()
    else:
        stop_ray(stage.link)
    left = [process for process in processes()[1:] if "ray" in command_line(process)]
    assert not left, f"left behind: {left}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for Ray's sockets below it; what is left in `folder / "t"` would be ours."""
    made = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", smollm2)


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path, port: int) -> ClusterConfig:
    return ClusterConfig(
        model=str(tiny_model),
        served_model_names=("tiny",),
        groups=2,
        port=port,
        device="cpu",
        dtype="fp32",
        threads=1,
        kv_memory="48MiB",
        block_size=16,
        max_model_len=8192,
        drain_s=2.0,
    )


@pytest.fixture
def tiny(stage: Stage, tiny_config: ClusterConfig) -> Stage:
    """Two groups of one rank, each with a tiny random model."""
    return stage.show(tiny_config)
