"""The ladder: one row at a time, hysteresis, dwell, what each level lets a step hold; and what a full group costs."""

from __future__ import annotations

import random

import pytest

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant
from cluster.coordination.ladder import Ladder, Level, Signals
from cluster.coordination.terms import CoordinatorTerms, Thresholds
from kvstore.store import PoolReport
from tests.coordination import Listener, answer, ask, card, outcome
from workers.plan import GroupReport

NORMAL, TRIM, SHRINK, COMPACT, REFUSE = Level
AT = Thresholds(dwell_up_s=2.0, dwell_down_s=10.0)


def climb(ladder: Ladder, signals: Signals, begin: float, seconds: float = 60.0) -> list[tuple[float, Level]]:
    """Moves under steady signals, looked at twice a second."""
    moves, level = [], ladder.level
    for half in range(int(2 * seconds)):
        now = begin + half / 2
        if ladder.update(signals, now) is not level:
            level = ladder.level
            moves.append((now, level))
    return moves


@pytest.mark.parametrize(
    ("held", "growth", "full", "rows"),
    [
        (0.79, 0.99, True, []),
        (0.80, 0.99, False, [TRIM]),
        (0.95, 1.00, False, [TRIM]),
        (0.99, 1.00, False, [TRIM]),
        (0.10, 1.01, False, [TRIM, SHRINK]),
        (0.90, 1.20, True, [TRIM, SHRINK]),
        (0.97, 1.20, False, [TRIM, SHRINK]),
        (0.97, 1.20, True, [TRIM, SHRINK, REFUSE]),
        (0.97, 0.90, True, [TRIM, SHRINK, REFUSE]),
    ],
)
def test_it_climbs_as_far_as_its_signals_ask_one_row_at_a_time(
    held: float, growth: float, full: bool, rows: list[Level]
) -> None:
    ladder = Ladder(AT, 0.0)
    moves = climb(ladder, Signals(held, growth, full), 100.0)
    assert [level for _, level in moves] == rows
    assert [at for at, _ in moves] == [100.0 + 2.0 * place for place in range(len(rows))]


@pytest.mark.parametrize(
    ("start", "signals", "stays"),
    [
        (Signals(0.85, 0.5), Signals(0.71, 0.5), True),
        (Signals(0.85, 0.5), Signals(0.69, 0.5), False),
        (Signals(0.85, 1.1), Signals(0.85, 0.96), True),
        (Signals(0.85, 1.1), Signals(0.85, 0.94), False),
        (Signals(0.98, 1.1, True), Signals(0.91, 1.1, True), True),
        (Signals(0.98, 1.1, True), Signals(0.89, 1.1, True), False),
        (Signals(0.98, 1.1, True), Signals(0.98, 1.1, False), False),
    ],
)
def test_the_way_down_has_thresholds_of_its_own(start: Signals, signals: Signals, stays: bool) -> None:
    ladder = Ladder(AT, 0.0)
    climb(ladder, start, 0.0)
    top = ladder.level
    moves = climb(ladder, signals, 100.0)
    assert (ladder.level is top) == stays
    assert all(
        after.row == before.row - 1
        for before, after in zip([top, *(m for _, m in moves)], [m for _, m in moves], strict=False)
    )


def test_a_level_lasts_for_its_dwell() -> None:
    ladder = Ladder(AT, 0.0)
    assert climb(ladder, Signals(0.9, 1.5), 0.0, 5.0) == [(0.0, TRIM), (2.0, SHRINK)]
    assert climb(ladder, Signals(0.0, 0.0), 3.0) == [(12.0, TRIM), (22.0, NORMAL)]


def test_the_time_in_each_level_and_the_moves_are_counted() -> None:
    ladder = Ladder(AT, 10.0)
    ladder.update(Signals(0.9, 1.5), 13.0)
    ladder.update(Signals(0.9, 1.5), 15.0)
    ladder.update(Signals(0.9, 0.5), 30.0)
    seconds = ladder.seconds(34.0)
    assert seconds == {"normal": 3.0, "trim": 6.0, "shrink": 15.0, "compact": 0.0, "refuse": 0.0}
    assert (ladder.changes, ladder.lasted(34.0), ladder.term) == (3, 4.0, "held")


@pytest.mark.parametrize(
    ("signals", "term"),
    [
        (Signals(0.5, 0.5), ""),
        (Signals(0.9, 0.5), "held"),
        (Signals(0.9, 1.5), "growth"),
        (Signals(0.2, 1.5), "growth"),
        (Signals(0.98, 1.5, True), "line"),
    ],
)
def test_the_term_that_drives_the_level_is_known(signals: Signals, term: str) -> None:
    ladder = Ladder(AT, 0.0)
    climb(ladder, signals, 0.0)
    assert ladder.term == term and ladder.signals == signals


def test_what_each_level_lets_a_step_hold() -> None:
    ladder = Ladder(AT, 0.0)
    limits = ladder.limits(8, 512)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.chunk) == (8, 512, 512)
    assert limits.refill and not limits.trim
    ladder.update(Signals(0.9, 1.5), 0.0)
    assert ladder.limits(8, 512).trim and ladder.limits(8, 512).refill and ladder.limits(8, 512).chunk == 512
    ladder.update(Signals(0.9, 1.5), 2.0)
    limits = ladder.limits(8, 512)
    assert (limits.max_num_seqs, limits.chunk, limits.refill, limits.trim) == (8, 256, False, True)
    assert ladder.limits(1, 1).chunk == 1
    ladder.update(Signals(0.9, 0.94), 3.0)
    limits = ladder.limits(8, 512)
    assert ladder.level is SHRINK and limits.refill, "the level lasts for its dwell, what it costs ends with its cause"


def test_levels_are_named_and_numbered_as_documented() -> None:
    assert [level.label for level in Level] == ["normal", "trim", "shrink", "compact", "refuse"]
    assert [level.row for level in (NORMAL, TRIM, SHRINK, REFUSE)] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_signals_it_moves_one_row_keeps_its_dwell_and_never_compacts(seed: int) -> None:
    chance = random.Random(seed)
    at = Thresholds(dwell_up_s=chance.choice((0.5, 2.0)), dwell_down_s=chance.choice((1.0, 10.0)))
    ladder, now, since, level = Ladder(at, 0.0), 0.0, float("-inf"), NORMAL
    moves = 0
    for _ in range(2000):
        now += chance.uniform(0.05, 1.0)
        ladder.update(Signals(chance.random(), 1.5 * chance.random(), chance.random() < 0.5), now)
        if ladder.level is level:
            continue
        moves += 1
        assert ladder.level is not COMPACT and abs(ladder.level.row - level.row) == 1
        assert now - since >= (at.dwell_up_s if ladder.level > level else at.dwell_down_s)
        assert ladder.shrinks <= (ladder.level >= SHRINK)
        since, level = now, ladder.level
    assert ladder.changes == moves > 10
    assert sum(ladder.seconds(now).values()) == pytest.approx(now)


# -- a group that is always full --------------------------------------------------------------------------------------


class Busy:
    """A group of 200 blocks that steps 30 times a second, and as many clients as want: each asks again at once. Its
    requests generate what they will, whatever they were granted; it forecasts that each goes on as long as granted."""

    def __init__(self, seed: int, thresholds: Thresholds, *, slots: int = 64, mean: float = 60.0) -> None:
        self.chance = random.Random(seed)
        self.coordinator = Coordinator(CoordinatorTerms(ladder=thresholds), seed=seed)
        self.card = card(blocks=200, max_num_seqs=slots, max_num_batched_tokens=512, max_model_len=2000)
        self.listener = Listener(self.coordinator)
        self.epoch = self.coordinator.join(self.card, 0.0)
        self.mean = mean
        self.live: list[list[object]] = []  # [grant, length, expected length, end]
        self.tokens = self.overruns = self.sequence = 0
        self.held: list[float] = []
        self.serial = 0

    def run(self, seconds: float, clients: int) -> None:
        for _ in range(clients):
            self._ask(0.0)
        for step in range(int(30 * seconds)):
            now = step / 30
            self._step(now)
            if step % 15 == 0:
                self._report(now)
                self.coordinator.tick(now)

    def _ask(self, now: float) -> None:
        self.serial += 1
        found = answer(self.coordinator, ask(str(self.serial), prompt=64, most=256), now)
        if isinstance(found, Grant):
            self._start(found)

    def _start(self, grant: Grant) -> None:
        output = min(256, max(1, int(self.chance.expovariate(1 / self.mean))))
        self.live.append([grant, 64, grant.blocks * 16, 64 + output])

    def _step(self, now: float) -> None:
        for entry in list(self.live):
            entry[1] += 1  # type: ignore[operator]
            self.tokens += 1
            if entry[1] >= entry[3]:  # type: ignore[operator]
                self.live.remove(entry)
                self.coordinator.settle([outcome(entry[0], output=entry[3] - 64)], now)  # type: ignore[arg-type,operator]
                self._ask(now)
        for found in self.listener.hear(now):
            if isinstance(found, Grant):
                self._start(found)
        held = sum(-(-entry[1] // 16) for entry in self.live)  # type: ignore[operator]
        self.overruns += held > 200
        self.held.append(held / 200)

    def _forecast(self) -> int:
        """The most blocks at one time: every end is a candidate."""
        spans = sorted((max(0, e[2] - e[1]), e[1], max(e[1], e[2])) for e in self.live)  # type: ignore[operator,type-var]
        peak, ends = sum(-(-e[1] // 16) for e in self.live), [span[0] for span in spans]  # type: ignore[operator]
        for end in set(ends):
            peak = max(peak, sum(-(-(length + end) // 16) for left, length, _ in spans if left >= end))
        return int(peak)

    def _report(self, now: float) -> None:
        self.sequence += 1
        ids = tuple(entry[0].id for entry in self.live)  # type: ignore[attr-defined]
        held = min(200, sum(-(-entry[1] // 16) for entry in self.live))  # type: ignore[operator]
        pool = PoolReport(200, 200 - held, held, 0, 0, 16)
        told = GroupReport("a", self.epoch, self.sequence, self.sequence, pool, self._forecast(), len(ids), 0, 0)
        self.coordinator.report(
            GroupReport(**{name: getattr(told, name) for name in told.__slots__} | {"live": ids, "accepted": ids}), now
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_saturated_group_loses_no_throughput_to_the_ladder_and_does_not_flap(seed: int) -> None:
    never = Thresholds(trim_up=9.0, trim_down=9.0, shrink_up=9.0, shrink_down=9.0, refuse_up=9.0, refuse_down=9.0)
    with_ladder, without = Busy(seed, Thresholds()), Busy(seed, never)
    for busy in (with_ladder, without):
        busy.run(120.0, clients=48)
    ladder = with_ladder.coordinator._view.groups["a"].ladder
    held = with_ladder.held[600:]
    assert sum(held) / len(held) >= 0.85
    assert with_ladder.tokens >= 0.97 * without.tokens
    assert with_ladder.overruns <= 1.25 * without.overruns
    assert ladder.changes <= 12, "six a minute"
    assert ladder.seconds(120.0)["normal"] <= 24.0
