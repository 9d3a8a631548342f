"""The container images, as far as their Dockerfiles tell: what goes in is there, what comes out runs as nobody special,
small and with its kernels compiled. Nothing is built here."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import manifests
from workers.native.pairs import part_named

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
KINDS = ("cpu", "cuda")
STEPS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


@dataclass(frozen=True)
class Step:
    """One instruction, in the stage `stage`, which begins from `origin`."""

    stage: str
    origin: str
    word: str
    rest: str


def read(kind: str) -> list[Step]:
    text = (DOCKER / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stage, origin, steps = "", "", []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            origin, _, stage = rest.partition(" AS ")
        steps.append(Step(stage, origin, word, rest.strip()))
    return steps


def lineage(steps: list[Step], stage: str) -> list[Step]:
    """The steps that make the image of `stage`, those of the stages that it begins from first."""
    own = [step for step in steps if step.stage == stage]
    return [*(lineage(steps, own[0].origin) if any(each.stage == own[0].origin for each in steps) else ()), *own]


def sources(step: Step) -> list[str]:
    return [word for word in shlex.split(step.rest)[:-1] if not word.startswith("--")]


@pytest.fixture(params=KINDS)
def steps(request: pytest.FixtureRequest) -> list[Step]:
    return read(request.param)


def test_every_instruction_is_known(steps: list[Step]) -> None:
    assert {step.word for step in steps} <= STEPS


def test_stages_begin_from_a_version_that_stays_the_same(steps: list[Step]) -> None:
    """And all from the same: what one has installed runs in the other."""
    stages = {step.stage for step in steps}
    (version,) = (step.rest.partition("=")[2] for step in steps if step.rest.startswith("PYTHON="))
    assert re.fullmatch(r"3\.11\.\d+-slim-\w+", version)
    for origin in {step.origin for step in steps if step.word == "FROM"} - stages:
        assert origin == "python:${PYTHON}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_in_is_there_and_not_left_out(kind: str) -> None:
    ignored = (DOCKER / f"Dockerfile.{kind}.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and any(fnmatch.fnmatch("deploy/kuberay/base/secrets", f"*/{line[3:]}") for line in ignored)
    copied = {
        name for step in read(kind) if step.word == "COPY" and "--from" not in step.rest for name in sources(step)
    }
    assert copied == kept and all((ROOT / name).exists() for name in copied)


def test_the_packages_that_are_installed_are_all_copied(steps: list[Step]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    copied = {name for step in steps if step.word == "COPY" for name in sources(step)}
    assert packages | {"pyproject.toml", project["project"]["readme"]} <= copied


def test_what_comes_from_another_stage_is_made_there(steps: list[Step]) -> None:
    stages = {step.stage for step in steps}
    for step in (step for step in steps if step.word == "COPY" and "--from" in step.rest):
        (named,) = re.findall(r"--from=(\w+)", step.rest)
        assert named in stages
        made = " ".join(each.rest for each in lineage(steps, named))
        (source,) = sources(step)
        assert f"/{source.strip('/').split('/')[0]}" in made


@pytest.mark.parametrize(("kind", "stage"), [("cpu", "release"), ("cpu", "demo"), ("cuda", "release")])
def test_an_image_runs_as_the_user_that_the_pods_have_and_carries_no_compiler(kind: str, stage: str) -> None:
    made = lineage(read(kind), stage)
    (user,) = (step.rest for step in made if step.word == "USER")
    text = (manifests.KUBERAY / "base" / "service.yaml").read_text(encoding="utf-8")
    security = next(manifests.walk(yaml.safe_load(text), "securityContext"))
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    assert not any(re.search(r"\b(apt-get|pip|g\+\+)\b", step.rest) for step in made if step.word == "RUN")
    assert [step.rest for step in made if step.word == "CMD"] == ['["tidegate", "serve"]']


def test_the_kernels_are_compiled_for_where_the_image_looks_for_them(steps: list[Step]) -> None:
    (command,) = (step.rest for step in steps if "workers.native.prebuild" in step.rest)
    words = shlex.split(command)
    folder = words[words.index("workers.native.prebuild") + 1]
    pairs = [words[index + 1] for index, word in enumerate(words) if word == "--pair"]
    assert pairs and all(part_named(pair) for pair in pairs)
    (copied,) = (shlex.split(step.rest) for step in steps if step.word == "COPY" and f" {folder} " in step.rest)
    cache = next(found[1] for step in steps if (found := re.search(r"TIDEGATE_CACHE=(/var\S+)", step.rest)))
    assert copied[-1] == f"{cache}/native" and "--chown=1000:1000" in copied


def test_downloads_leave_no_cache_behind(steps: list[Step]) -> None:
    for step in (step for step in steps if step.word == "RUN" and "apt-get" in step.rest):
        assert "--no-install-recommends" in step.rest and "rm -rf /var/lib/apt/lists/*" in step.rest
    assert any("PIP_NO_CACHE_DIR=1" in step.rest for step in steps if step.word == "ENV")


def test_the_overlays_ask_for_images_that_are_described() -> None:
    described = {
        tag
        for kind in KINDS
        for tag in re.findall(r"-t tidegate:(\S+)", (DOCKER / f"Dockerfile.{kind}").read_text(encoding="utf-8"))
    }
    asked = {
        image["newTag"]
        for path in manifests.KUBERAY.rglob("kustomization.yaml")
        for image in yaml.safe_load(path.read_text(encoding="utf-8")).get("images", ())
    }
    assert asked == described == {"0.1.0-cpu", "0.1.0-demo", "0.1.0-cuda"}
