"""The search for a map: on layers whose harm is made up, so that the best map is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deploy.quality.figures import Cost, Estimate, Limits
from deploy.quality.search import Found, Measures, mapped, search
from kvstore.precisions import PrecisionMap, Words

INT4, MIXED, INT8, PLAIN = (Words(*pair) for pair in (("int4",) * 2, ("int8", "int4"), ("int8",) * 2, ("bf16",) * 2))
RUNGS = (INT4, MIXED, INT8, PLAIN)
BYTES = {INT4: 10, MIXED: 15, INT8: 20, PLAIN: 40}


@dataclass
class Model:
    """A model whose layer i in INT4 moves the distribution by harm[i], a tenth of it with keys in INT8, a hundredth in
    INT8. Notes what was measured."""

    harm: Sequence[float]
    tried: list[PrecisionMap] = field(default_factory=list)
    probed: list[PrecisionMap] = field(default_factory=list)

    def kl(self, precision: PrecisionMap) -> float:
        share = {"int4": 1.0, "k int8 v int4": 0.1, "int8": 0.01, "bf16": 0.0}
        return sum(h * share[one.label] for h, one in zip(self.harm, precision.of(len(self.harm)), strict=True))

    def cost(self, precision: PrecisionMap) -> Cost:
        self.tried.append(precision)
        return Cost(Estimate(self.kl(precision), 0.0), Estimate(1.0, 0.0), 30.0, Estimate(0.0, 0.0), 1023)

    def short(self, precision: PrecisionMap) -> float:
        self.probed.append(precision)
        return self.kl(precision)

    def bytes(self, precision: PrecisionMap) -> int:
        by_label = {words.stored.label: size for words, size in BYTES.items()}
        return sum(by_label[one.label] for one in precision.of(len(self.harm)))

    def search(self, max_kl: float, budget: int | None = None) -> Found:
        measures = Measures(self.cost, self.short, self.bytes)
        said: list[str] = []
        found = search(len(self.harm), RUNGS, measures, Limits(max_kl=max_kl), said.append, budget=budget)
        assert (found.tried, found.probed) == (len(self.tried), len(self.probed))
        assert len(set(map(repr, self.tried))) == len(self.tried), "nothing is measured twice"
        assert len(said) == len(self.tried) + len(self.probed)
        return found


def test_the_most_compact_map_is_taken_at_once_where_it_passes() -> None:
    model = Model([0.001] * 6)
    found = model.search(0.02)
    assert found.precision == PrecisionMap(INT4) and not found.faults
    assert (len(model.tried), len(model.probed)) == (1, 0)


def test_the_layers_that_hurt_most_are_raised() -> None:
    model = Model([0.001, 0.05, 0.001, 0.001, 0.03, 0.001])
    found = model.search(0.02)
    assert [one.label for one in found.precision.of(6)] == [
        "int4",
        "k int8 v int4",
        "int4",
        "int4",
        "k int8 v int4",
        "int4",
    ]
    assert found.cost is not None and found.cost.kl.mean == pytest.approx(0.012)
    assert found.token_bytes == 70
    assert len(model.probed) == 6, "the rung above passes whole, so that only the lowest is measured alone"


@pytest.mark.parametrize("seed", range(5))
def test_no_map_of_the_same_rungs_that_passes_is_smaller(seed: int) -> None:
    """Two rungs of equal steps: greedy is exact there."""
    import random

    rng = random.Random(seed)
    harm = [rng.uniform(0, 0.05) for _ in range(7)]
    found = Model(harm).search(0.06)
    passing = (each for each in itertools.product((INT4, MIXED), repeat=7) if Model(harm).kl(mapped(each)) <= 0.06)
    assert found.token_bytes == min(Model(harm).bytes(mapped(each)) for each in passing)


def test_a_model_that_bears_nothing_stays_as_it_is_in_those_layers() -> None:
    found = Model([100.0, 0.0, 0.0]).search(0.02)
    assert [one.label for one in found.precision.of(3)] == ["bf16", "int4", "int4"]
    found = Model([100.0] * 3).search(1e-9)
    assert found.precision == PrecisionMap(PLAIN) and found.cost is None and not found.faults


def test_a_budget_that_is_too_small_says_what_stands_in_the_way() -> None:
    model = Model([0.05] * 6)
    found = model.search(0.02, budget=65)
    assert found.faults == ("KL 0.2550 is above max_kl 0.02",)
    assert found.token_bytes == 65
    found = Model([0.05] * 6).search(0.02, budget=59)
    assert found.faults == ("even int4 takes 60 bytes per token, and the budget is 59",)


def test_a_budget_that_suffices_changes_nothing() -> None:
    harm = [0.001, 0.05, 0.001, 0.001, 0.03, 0.001]
    assert Model(harm).search(0.02, budget=85).precision == Model(harm).search(0.02).precision


def test_maps_are_written_as_ranges_around_what_most_layers_have() -> None:
    found = mapped([INT4, INT4, MIXED, INT8, MIXED, MIXED, MIXED, INT4])
    assert found.plain == {
        "default": {"k": "int8", "v": "int4"},
        "layers": {"0-1": "int4", "3": "int8", "7": "int4"},
    }
    assert PrecisionMap.parse(found.plain).of(8) == found.of(8)
