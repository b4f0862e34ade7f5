"""Bytes and times as people write them. SI and binary are told apart: `16GB` = 16e9, `16GiB` = `16g` = 16·2^30."""

from __future__ import annotations

import re
from fractions import Fraction

from memopt.errors import UsageError
from memopt.words import format_bytes as format_bytes
from memopt.words import format_change as format_change
from memopt.words import format_ms as format_ms
from memopt.words import typed_bytes as typed_bytes

_SI = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_UNITS = {**_SI, **_BINARY}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)")
_MOST_BYTES = 2**60
_MOST_DIGITS = 60
_HARDLY_BYTES = 1000
"""A smaller budget was hardly meant in bytes."""


def parse_bytes(text: str, *, of_bytes: int | None = None) -> int:
    """Bytes meant by `text` (`16GB`, `16GiB`, `16g`, `123`); `80%` is a share of `of_bytes`.

    Raises `UsageError` for anything that is not a positive, finite amount below 2^60.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise _not_bytes(text)
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if of_bytes is None:
            raise UsageError(
                f"'{text}' cannot be meant here",
                why="it is a share, and there is no peak to take it of",
                try_="bytes, such as 16GB",
            )
        amount = number / 100 * of_bytes
        if amount < 1:
            raise UsageError(
                f"'{text}' is less than one byte",
                why=f"it is a share of the unplanned peak, which is {format_bytes(of_bytes)}"
                if number
                else "it is nothing",
                try_="--budget min, for as little as can be",
            )
    elif unit in _UNITS:
        amount = number * _UNITS[unit]
    else:
        raise _not_bytes(text)
    if not 1 <= amount < _MOST_BYTES:
        raise UsageError(
            f"'{text}' is not a usable amount of memory",
            why="it must be at least one byte and less than 1 EiB",
            try_="16GB, 16GiB, 16g, 500MB or 80%",
        )
    return int(amount)


def parse_budget(text: str, *, of_bytes: int | None = None, option: str = "--budget") -> int:
    """As `parse_bytes`; raises for a small number without a unit, too, which was hardly meant in bytes. `option`: where it was given."""
    amount = parse_bytes(text, of_bytes=of_bytes)
    if amount < _HARDLY_BYTES and text.strip().isdecimal():
        raise UsageError(
            f"{option} {amount} is {amount} bytes",
            why="a number without a unit is bytes",
            try_=f"{option} {amount}GB, or {option} {amount}B where that is meant",
        )
    return amount


def _not_bytes(text: str) -> UsageError:
    return UsageError(
        f"'{text}' is not an amount of memory",
        why="GB is 10^9 bytes, GiB or g is 2^30 bytes, % is a share of the unplanned peak",
        try_="16GB, 16GiB, 16g, 500MB or 80%",
    )
