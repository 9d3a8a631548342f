"""PrecisionMap: in which precision each layer keeps keys and values. It knows no model, only how many layers it has.

Written as one word, `int8`, or as a mapping: `{default: int8, layers: {0-2: bf16, -3-: bf16}}`. A range names layers
from 0 on, both ends included; negative numbers count from the end, `-3-` are the last three. Where keys and values
differ, `{k: int8, v: int4}` stands instead of a word. `int4_channel` is how keys may be kept: alone it means values in
int4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from kvstore.layout import Precision

AUTO = "auto"
"""The precision of the model's activations, whatever that is."""
LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""Torch's, which many write."""
LABELS = (AUTO, *(precision.label for precision in Precision))

_RANGE = re.compile(r"(-?\d+)(?:(-)(-?\d+)?)?")


class PrecisionError(ValueError):
    """A map that cannot be meant. `key` is the path to what is wrong in it, "" the whole."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key = key
        self.message = message

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


@dataclass(frozen=True, slots=True)
class Stored:
    """How a layer keeps its keys and its values."""

    key: Precision
    value: Precision

    @property
    def label(self) -> str:
        """In one word or two."""
        return self.key.label if self.value is self.key.of_values else f"k {self.key.label} v {self.value.label}"


@dataclass(frozen=True, slots=True)
class Words:
    """`Stored` before "auto" is settled."""

    key: str
    value: str

    @classmethod
    def parse(cls, given: object, key: str) -> Words:
        """One word, or {k: word, v: word}; PrecisionError with the path that begins with `key`."""
        if isinstance(given, Mapping):
            if set(given) != {"k", "v"}:
                raise PrecisionError(key, f"wants a precision, or both k and v, got {_shown(given)}")
            value = _word(given["v"], _path(key, "v"))
            if _of_values(value) != value:
                raise PrecisionError(_path(key, "v"), f"{value} is for keys alone; write {_of_values(value)}")
            return cls(_word(given["k"], _path(key, "k")), value)
        word = _word(given, key)
        return cls(word, _of_values(word))

    @property
    def plain(self) -> object:
        """What `parse` makes this of."""
        return self.key if self.value == _of_values(self.key) else {"k": self.key, "v": self.value}

    def settle(self, auto: Precision) -> Words:
        """With `auto` in the place of "auto"."""
        return Words(*(auto.label if word == AUTO else word for word in (self.key, self.value)))

    @property
    def stored(self) -> Stored:
        """Raises ValueError while something is "auto"."""
        return Stored(Precision.parse(self.key), Precision.parse(self.value))


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `last`, both included, negative ones from the end; as its operator wrote it: `text`."""

    first: int
    last: int
    text: str

    @classmethod
    def parse(cls, given: object, key: str) -> LayerRange:
        """`3`, `0-2`, `5-`, `-1`, `-3-`, `-6--4`."""
        text = str(given).strip()
        match = _RANGE.fullmatch(text) if not isinstance(given, bool) else None
        if match is None:
            raise PrecisionError(_path(key, text), "is no range of layers: write 4, 0-2, 5-, or -3- for the last three")
        first = int(match[1])
        last = first if match[2] is None else int(match[3]) if match[3] is not None else -1
        return cls(first, last, text)

    def of(self, layers: int) -> range:
        """The layers among `layers`; PrecisionError when some are not there or none is named."""
        first, last = (number + layers if number < 0 else number for number in (self.first, self.last))
        if not 0 <= first <= last < layers:
            raise PrecisionError(f"layers.{self.text}", f"the model has layers 0 to {layers - 1}")
        return range(first, last + 1)


@dataclass(frozen=True, slots=True)
class PrecisionMap:
    """`default` for all layers that no range names."""

    default: Words = Words(AUTO, AUTO)
    layers: tuple[tuple[LayerRange, Words], ...] = ()

    @classmethod
    def parse(cls, given: object) -> PrecisionMap:
        """A word, {k: …, v: …}, or {default: …, layers: {range: …}}; PrecisionError says what is wrong with another."""
        if not isinstance(given, Mapping) or set(given) & {"k", "v"}:
            return cls(Words.parse(given, ""))
        if strange := set(given) - {"default", "layers"}:
            raise PrecisionError("", f"knows default and layers, or k and v, not {', '.join(map(str, strange))}")
        ranges = given.get("layers") or {}
        if not isinstance(ranges, Mapping):
            raise PrecisionError("layers", f"wants a mapping from ranges of layers to precisions, got {_shown(ranges)}")
        named = tuple(
            (LayerRange.parse(text, "layers"), Words.parse(words, f"layers.{text}")) for text, words in ranges.items()
        )
        return cls(Words.parse(given.get("default", AUTO), "default"), named)

    @classmethod
    def uniform(cls, precision: Precision) -> PrecisionMap:
        """All layers in `precision`."""
        return cls(Words(precision.label, precision.of_values.label))

    @property
    def plain(self) -> object:
        """What `parse` makes this of, for JSON."""
        if not self.layers:
            return self.default.plain
        return {"default": self.default.plain, "layers": {layers.text: words.plain for layers, words in self.layers}}

    @property
    def words(self) -> tuple[Words, ...]:
        """All that it names, the default first."""
        return (self.default, *(words for _, words in self.layers))

    def settle(self, auto: Precision) -> PrecisionMap:
        """With `auto` in the place of every "auto"."""
        return PrecisionMap(
            self.default.settle(auto), tuple((layers, words.settle(auto)) for layers, words in self.layers)
        )

    def of(self, layers: int) -> tuple[Stored, ...]:
        """What each of `layers` layers keeps. PrecisionError for a layer that is named twice or is not there."""
        found: dict[int, Words] = {}
        for named, words in self.layers:
            for index in named.of(layers):
                if index in found:
                    raise PrecisionError(f"layers.{named.text}", f"layer {index} is named twice")
                found[index] = words
        return tuple(found.get(index, self.default).stored for index in range(layers))

    def spelled(self, layers: int) -> str:
        """For people and keys: "int8", or "bf16 (layers 0-2), int8 (3-26), bf16 (27-29)"."""
        runs = [(stored.label, list(run)) for stored, run in groupby(self.of(layers))]
        if len(runs) == 1:
            return runs[0][0]
        parts, at = [], 0
        for label, run in runs:
            last = at + len(run) - 1
            parts.append(f"{label} ({'layers ' if not at else ''}{at if at == last else f'{at}-{last}'})")
            at = last + 1
        return ", ".join(parts)


AUTOMATIC = PrecisionMap()
"""All layers as the model's activations are."""


def _word(given: object, key: str) -> str:
    text = LONG_NAMES.get(str(given), str(given))
    if text not in LABELS:
        raise PrecisionError(key, f"must be one of {', '.join(LABELS)}, got {_shown(given)}")
    return text


def _of_values(word: str) -> str:
    """The word for the values where `word` is said of keys and values."""
    return word if word == AUTO else Precision.parse(word).of_values.label


def _path(*keys: str) -> str:
    return ".".join(key for key in keys if key)


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:57] + "..."
