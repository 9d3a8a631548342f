"""Which layer is kept in which precision: how it is written, what it selects, what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import Precision
from kvstore.precisions import LABELS, PrecisionError, PrecisionMap, Stored

INT8, BF16, FP16, INT4 = Precision.INT8, Precision.BF16, Precision.FP16, Precision.INT4


def labels(given: object, layers: int) -> list[str]:
    return [stored.label for stored in PrecisionMap.parse(given).settle(BF16).of(layers)]


def test_one_word_is_for_all_layers() -> None:
    assert labels("int8", 3) == ["int8"] * 3 and labels("auto", 2) == ["bf16"] * 2


def test_ranges_count_from_both_ends() -> None:
    """The case of a model of 80 layers whose first and last three stay in 16 bits."""
    stored = PrecisionMap.parse({"default": "int8", "layers": {"0-2": "fp16", "-3-": "fp16"}}).of(80)
    assert [index for index, one in enumerate(stored) if one.key is FP16] == [0, 1, 2, 77, 78, 79]
    assert all(one == Stored(INT8, INT8) for one in stored[3:77])


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        (4, [4]),
        ("4", [4]),
        (-1, [9]),
        ("0-2", [0, 1, 2]),
        ("7-", [7, 8, 9]),
        ("-3-", [7, 8, 9]),
        ("-4--2", [6, 7, 8]),
        ("2--7", [2, 3]),
        ("0-", list(range(10))),
    ],
)
def test_every_way_to_name_layers(text: object, selected: list[int]) -> None:
    found = labels({"default": "int8", "layers": {text: "fp32"}}, 10)
    assert [index for index, label in enumerate(found) if label == "fp32"] == selected


def test_keys_and_values_may_differ() -> None:
    assert labels({"k": "int8", "v": "int4"}, 1) == ["k int8 v int4"]
    found = labels({"default": {"k": "int8", "v": "int4"}, "layers": {0: "auto", 1: {"k": "fp32", "v": "auto"}}}, 3)
    assert found == ["bf16", "k fp32 v bf16", "k int8 v int4"]


def test_int4_channel_alone_means_values_by_token() -> None:
    word, spelled = PrecisionMap.parse("int4_channel"), PrecisionMap.parse({"k": "int4_channel", "v": "int4"})
    assert word == spelled == PrecisionMap.uniform(Precision.INT4_CHANNEL) and word.plain == "int4_channel"
    assert word.of(1)[0] == Stored(Precision.INT4_CHANNEL, INT4) and labels("int4_channel", 2) == ["int4_channel"] * 2
    mixed = {"k": "int4_channel", "v": "bf16"}
    assert PrecisionMap.parse(mixed).plain == mixed and labels(mixed, 1) == ["k int4_channel v bf16"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("fp7", "must be one of auto, fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4, int4_channel, got 'fp7'"),
        (8, "got 8"),
        (None, "got None"),
        (["int8"], r"got \['int8'\]"),
        ({"k": "int8"}, "both k and v"),
        ({"k": "int8", "v": "x"}, "^v: must be one of"),
        ({"k": "int8", "v": "int4_channel"}, "^v: int4_channel is for keys alone; write int4"),
        ({"layers": {"0-2": "x"}}, r"^layers\.0-2: must be one of"),
        ({"layers": {"0-2": {"k": "int8"}}}, r"^layers\.0-2: wants a precision, or both k and v"),
        ({"layers": {"first": "int8"}}, r"^layers\.first: is no range"),
        ({"layers": {True: "int8"}}, "is no range"),
        ({"layers": "int8"}, "^layers: wants a mapping"),
        ({"default": "x"}, "^default: "),
        ({"defaults": "int8"}, "knows default and layers"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_path(given: object, says: str) -> None:
    with pytest.raises(PrecisionError, match=says):
        PrecisionMap.parse(given)


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        (["0-3"], r"^layers\.0-3: the model has layers 0 to 2"),
        (["-4-"], "has layers 0 to 2"),
        (["2-1"], "has layers"),
        ([3], "has layers"),
        (["0-1", "1-2"], r"^layers\.1-2: layer 1 is named twice"),
        ([0, -3], "layer 0 is named twice"),
    ],
)
def test_layers_that_are_not_there_or_named_twice_are_refused(ranges: list[object], says: str) -> None:
    with pytest.raises(PrecisionError, match=says):
        PrecisionMap.parse({"default": "int8", "layers": dict.fromkeys(ranges, "bf16")}).of(3)


def test_spelled_for_people() -> None:
    assert PrecisionMap.parse("int8").spelled(30) == "int8"
    mixed = PrecisionMap.parse({"default": "int8", "layers": {"0-2": "bf16", -1: {"k": "int8", "v": "int4"}}})
    assert mixed.spelled(5) == "bf16 (layers 0-2), int8 (3), k int8 v int4 (4)"


OF_VALUES = [label for label in LABELS if label != Precision.INT4_CHANNEL.label]
WORD = st.sampled_from(LABELS) | st.fixed_dictionaries({"k": st.sampled_from(LABELS), "v": st.sampled_from(OF_VALUES)})


@given(WORD, st.dictionaries(st.integers(0, 9), WORD))
def test_what_is_sent_as_json_comes_back_the_same(default: object, layers: dict[int, object]) -> None:
    given = PrecisionMap.parse({"default": default, "layers": layers})
    assert PrecisionMap.parse(json.loads(json.dumps(given.plain))) == given
    assert given.settle(INT4).of(10) == PrecisionMap.parse(given.settle(INT4).plain).of(10)
