"""Bytes and times as people write them. SI and binary are told apart: `16GB` = 16e9, `16GiB` = `16g` = 16·2^30."""

from __future__ import annotations

import re
from fractions import Fraction

from memopt.errors import UsageError

_SI = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_UNITS = {**_SI, **_BINARY}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)")
_MOST_BYTES = 2**60
_MOST_DIGITS = 60


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


def _not_bytes(text: str) -> UsageError:
    return UsageError(
        f"'{text}' is not an amount of memory",
        why="GB is 10^9 bytes, GiB or g is 2^30 bytes, % is a share of the unplanned peak",
        try_="16GB, 16GiB, 16g, 500MB or 80%",
    )


def format_bytes(amount: int) -> str:
    """`amount` in the binary unit a person would pick, three significant digits: `1.23 GiB`."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{_decimals(value)}f} {unit}"
        value /= 1024
    return f"{value:.{_decimals(value)}f} TiB"


def typed_bytes(amount: int) -> str:
    """`amount` as one types it, rounded up by less than 0.1 %: `1.235GiB`. `parse_bytes` gives `amount` at least."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            decimals = (
                3 if amount < 10 * size else 2 if amount < 100 * size else 1 if amount < 1000 * size else 0
            )
            number = f"{-(-amount * 10**decimals // size) / 10**decimals:.{decimals}f}"
            return f"{number.rstrip('0').rstrip('.') if decimals else number}{unit}"
    return str(amount)


def format_ms(milliseconds: float) -> str:
    """A duration as a person would write it: `850 µs`, `12.3 ms`, `4.56 s`."""
    if milliseconds < 1:
        return f"{milliseconds * 1000:.0f} µs"
    if milliseconds < 1000:
        return f"{milliseconds:.{_decimals(milliseconds)}f} ms"
    return f"{milliseconds / 1000:.{_decimals(milliseconds / 1000)}f} s"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
