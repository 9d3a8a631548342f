"""Sizes as people write them: "72MiB", "1.5GiB", "2GB" <-> bytes. Knows nothing of what is measured."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")
_HINT = 'write a number and a unit, as in "72MiB", "1.5GiB" or "2GB"'


def parse_size(value: object) -> int:
    """Bytes of `value`: an int is bytes already, a text has a unit (KiB, MiB, … or the decimal KB, MB, …).

    ValueError says what is wrong and how to write it. The result is rounded down to whole bytes and is at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"not a size: {value!r}; {_HINT}")
    if isinstance(value, int):
        amount = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(f"not a size: {value!r}; {_HINT}")
        unit = UNITS.get(match[2].upper())
        if unit is None:
            raise ValueError(f"unknown unit {match[2]!r} in {value!r}; {_HINT}")
        amount = int(Fraction(match[1]) * unit)
    if amount < 1:
        raise ValueError(f"must be more than nothing, got {value!r}")
    return amount


def format_size(amount: int) -> str:
    """`amount` bytes with the largest binary unit that keeps it at 1 or more: 75497472 -> "72.0 MiB"."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
