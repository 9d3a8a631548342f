"""`tidegate bench coordinator` and `pairs`: they measure, print and leave nothing behind."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deploy.__main__ import cli
from deploy.bench import coordination, coordination_ray

runner = CliRunner()


def test_the_coordinators_costs_are_measured_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "curves", lambda calls: [coordination.measure(2, 20, 10, calls=calls)])
    monkeypatch.setattr(coordination, "memory", lambda *sizes: 1.0)
    done = runner.invoke(cli, ["bench", "coordinator", "--calls", "10"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["groups"] == 2 and row["place_us"] > 0 and "place p50" in done.stdout


def test_pairs_over_ray_are_measured_on_a_ray_of_their_own_which_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(coordination_ray, "start_ray", lambda token, haproxy: calls.append("start"))
    monkeypatch.setattr(coordination_ray, "stop_ray", lambda link: calls.append("stop"))
    asked: dict[str, object] = {}

    def measure(**options: object) -> list[coordination_ray.Figure]:
        asked.update(options)
        return [coordination_ray.Figure(1, 700.0, 800.0, 0.88, 0)]

    monkeypatch.setattr(coordination_ray, "measure", measure)
    done = runner.invoke(cli, ["bench", "pairs", "--seconds", "0.5", "--rounds", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["figures"][0]["share"] == 0.88
    assert calls == ["start", "stop"] and asked["seconds"] == 0.5 and asked["rounds"] == 2
