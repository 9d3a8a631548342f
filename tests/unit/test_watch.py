"""What `tidegate status --watch` shows: a status as a picture, with rates from the one before."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from deploy.bench.probe import Probe, summary
from deploy.watch import BAR, Shot, frame, pool_bar, watch
from tests.statuses import a_row, a_status


def shown(*statuses: dict[str, Any], seconds: float = 2.0) -> str:
    """The last status as text, `seconds` after the one before."""
    shots = [Shot(status, index * seconds) for index, status in enumerate(statuses)]
    out = Console(file=io.StringIO(), width=240, color_system=None)
    out.print(frame(shots[-1], shots[-2] if len(shots) > 1 else None))
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_a_frame_shows_groups_line_and_refusals() -> None:
    text = shown(a_status())
    for part in (
        "tidegate at http://here:1",
        "trim 3.5 s",
        "25 (25%)",  # held
        "33 (33%)",  # committed
        "growth: held 25%, growth 90%",
        "4/8",
        "interactive",
        "12.5 s",
        "grants open 7, given 50",
        "cluster_full 8",
        "tenant_limit 3",
    ):
        assert part in text, part


def test_the_second_frame_has_rates() -> None:
    later = a_row(output_tokens=1100, preemptions=12, prompt_tokens=500, cached_tokens=180)
    text = shown(a_status(), a_status(later, refused={"cluster_full": 20, "never_fits": 1}))
    (row,) = [line for line in text.splitlines() if " 4/8 " in line]
    assert row.split()[-3:] == ["50", "1.5", "80%"], "tokens/s, preemptions/s, hits of these two seconds"
    assert "cluster_full 20 (6.0/s)" in text and "never_fits 1 (0.5/s)" in text


def test_rates_of_a_group_that_began_anew_are_left_open() -> None:
    text = shown(a_status(), a_status(a_row(epoch=2, output_tokens=5)))
    (row,) = [line for line in text.splitlines() if " 4/8 " in line]
    assert row.split()[-3:-1] == ["-", "-"]


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": None},
        {"drives": {}, "driven_by": ""},
        {"models": []},
        {"level": "refuse", "driven_by": "line", "level_s": 75.0},
        {"prompt_tokens": 0, "cached_tokens": 0},
    ],
)
def test_a_group_that_tells_little_is_shown_too(changes: dict[str, Any]) -> None:
    row = a_row(**changes)
    assert "g0" in shown(a_status(row), a_status(row))
    bare = {key: value for key, value in row.items() if key not in ("output_tokens", "preemptions", "prompt_tokens")}
    assert "g0" in shown(a_status(bare), a_status(bare))


def test_a_service_without_groups_or_line_is_shown_too() -> None:
    assert "nothing refused" in shown(a_status(groups=[], line={}, refused={}))


@pytest.mark.parametrize(
    ("blocks", "bar"),
    [
        ((100, 0, 0, 0), "█" * BAR),
        ((0, 0, 0, 100), "░" * BAR),
        ((50, 0, 0, 50), "█" * 12 + "░" * 12),
        ((1, 1, 1, 9997), "█▒▓" + "░" * 21),
        ((9997, 1, 1, 1), "█" * 21 + "▒▓░"),
        ((0, 0, 0, 0), ""),
    ],
)
def test_a_bar_is_as_wide_as_it_should_be_and_shows_whatever_there_is(blocks: tuple[int, ...], bar: str) -> None:
    assert pool_bar(dict(zip(("held", "dirty", "idle", "free"), blocks, strict=True))).plain == bar


@pytest.mark.parametrize("terminal", [True, False])
def test_frames_are_shown_with_and_without_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr("deploy.watch.PERIOD_S", 0.01)
    file = io.StringIO()
    watch(a_status, Console(file=file, width=200, force_terminal=terminal), frames=3)
    assert file.getvalue().count("http://here:1") >= 3
    assert ("\x1b[" in file.getvalue()) == terminal


def looks(*answers: dict[str, Any] | Exception) -> Callable[[], dict[str, Any]]:
    """Gives these in turn."""
    left = iter(answers)

    def look() -> dict[str, Any]:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return look


def test_a_coordinator_that_is_away_for_a_while_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.watch.PERIOD_S", 0.01)
    console = Console(file=io.StringIO(), width=200)
    look = looks(a_status(), ConnectionError("away"), a_status())
    watch(look, console, frames=3, failures=(ConnectionError,))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("http://here:1") == 3 and text.count("s ago: away") == 1


@pytest.mark.parametrize(
    ("answers", "failures"),
    [((ConnectionError("none"),), (ConnectionError,)), ((a_status(), ValueError("ours")), (ConnectionError,))],
    ids=["nothing to watch", "a fault of ours"],
)
def test_other_failures_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[Any, ...], failures: tuple[type[Exception], ...]
) -> None:
    monkeypatch.setattr("deploy.watch.PERIOD_S", 0.01)
    with pytest.raises(type(answers[-1])):
        watch(looks(*answers), Console(file=io.StringIO()), frames=3, failures=failures)


def test_a_summary_is_of_one_model_and_of_the_time_watched() -> None:
    first = [a_row("a", "m", level="trim"), a_row("b", "n", pool={"held": 100})]
    then = a_row("a", "m", level="normal", pool={"held": 75}, changes=5, output_tokens=1500, preemptions=10)
    last = [then | {"computed_tokens": 1800, "recomputed_tokens": 40}, first[1]]
    found = summary([a_status(*first), a_status(*last)], "m")
    assert found is not None
    assert (found.looks, found.held, found.committed) == (2, 0.5, 0.33)
    assert found.levels == {"trim": 0.5, "normal": 0.5}
    assert (found.level_changes, found.preemptions, found.output_tokens, found.recomputed) == (2, 1, 500, 0.02)
    assert summary([a_status()], "another") is None and summary([]) is None


def test_a_probe_looks_while_something_runs_and_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.bench.probe.PERIOD_S", 0.005)
    looks = 0

    def look() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise ConnectionError
        return a_status()

    with Probe(look, (ConnectionError,)) as probe:
        while looks < 5:
            pass
    assert len(probe.looks) == looks - 1
