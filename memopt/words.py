"""Bytes, times and changes in words, as a person reads or types them. A leaf: errors are written with it."""

from __future__ import annotations

_MUCH_WAITED = 0.1


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


def moved_away(count: int, size_bytes: int) -> str:
    """`2 storages (1.00 MiB) were moved away`."""
    was = "was" if count == 1 else "were"
    return f"{count} storage{'s' * (count != 1)} ({format_bytes(size_bytes)}) {was} moved away"


def waited_words(share: float) -> str:
    """On a machine on which the training thread waited for a processor for `share` of the time: what times leave out. Empty where that is little."""
    return (
        f"other processes had the processor for {100 * share:.0f} % of the time, which is left out"
        if share > _MUCH_WAITED
        else ""
    )


def format_ms(milliseconds: float) -> str:
    """A duration as a person would write it: `850 µs`, `12.3 ms`, `4.56 s`."""
    if milliseconds < 1:
        return f"{milliseconds * 1000:.0f} µs"
    if milliseconds < 1000:
        return f"{milliseconds:.{_decimals(milliseconds)}f} ms"
    return f"{milliseconds / 1000:.{_decimals(milliseconds / 1000)}f} s"


def format_change(now: float, before: float, *, none: str = "no change") -> str:
    """`-34 %`, `+1.2 %`, or `none`."""
    if before <= 0:
        return "n/a"
    percent = 100 * (now / before - 1)
    if abs(percent) < 0.05:
        return none
    return f"{percent:+.1f} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
