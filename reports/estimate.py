"""An estimate on the terminal: three answers with their error bars, what the peak is made of, and where it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from memopt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from memopt.estimators.estimate import Estimate


def print_estimate(console: Console, found: Estimate, target: str, *, explain: bool = False) -> None:
    """Print `found` for the `target` that was asked about."""
    console.print(f"{target} on {found.device}{' (partial)' if found.partial else ''}", style="bold", end="")
    console.print(f", {found.unfollowed}" if found.unfollowed else "")
    console.print(_answers(found))
    for line in _bounds(found):
        console.print(line)
    if found.by_category:
        console.print(_parts(found))
    for line in _fits(found):
        console.print(line)
    if found.left_out:
        console.print("left out: " + "; ".join(found.left_out))
    if explain:
        console.print(_modules(found))
        console.print(_policies(found))
    notes = [note for note in found.notes if note.removesuffix(" (an upper bound)") not in found.bounded]
    for note in notes if explain else notes[:4]:
        console.print(f"note: {note}")
    if not explain and len(notes) > 4:
        console.print(f"note: {len(notes) - 4} more with --explain")


def _answers(found: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("peak")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("what it is")
    if found.target == "cpu":
        rows = [
            ("tensors", found.allocated_bytes, "allocated", "live tensors, kernels' temporaries included")
        ]
    else:
        rows = [
            ("allocated", found.allocated_bytes, "allocated", "torch.cuda.max_memory_allocated()"),
            ("reserved", found.reserved_bytes, "reserved", "torch.cuda.max_memory_reserved()"),
            (
                "process",
                found.process_bytes or 0,
                "process",
                "as nvidia-smi shows it: reserved and the CUDA context",
            ),
        ]
    for name, size, key, meaning in rows:
        table.add_row(name, format_bytes(size), _bar(found, key), meaning)
    if found.smallest_bytes:
        table.add_row(
            "smallest",
            format_bytes(found.smallest_bytes),
            "",
            "the allocator's least, cached memory given back",
        )
    return table


def _bar(found: Estimate, answer: str) -> str:
    """The error bar: below, down to what is needed when the data selects least; above, up to all that may be left out."""
    share, above = found.error[answer], _above(found, answer)
    if found.lacks:
        return f"-{100 * share:.1f} %, or more"
    if not found.bounded:
        return f"±{100 * share:.1f} %" if above == share else f"-{100 * share:.1f} % +{100 * above:.1f} %"
    if answer not in found.range_bytes:
        return f"less, or +{100 * above:.1f} %"
    least, most = found.range_bytes[answer]
    below = 1 - (1 - share) * least / max(most, 1)
    return f"-{100 * below:.1f} % +{100 * above:.1f} %"


def _above(found: Estimate, answer: str) -> float:
    """What may be needed beyond the answer, as a share of it."""
    told = {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "process": found.process_bytes,
    }[answer]
    return max(found.error[answer], found.most_bytes.get(answer, 0) / max(told or 0, 1) - 1)


def _bounds(found: Estimate) -> list[str]:
    if not found.bounded:
        return []
    least, most = found.range_bytes.get("allocated", (None, found.allocated_bytes))
    low = "?" if least is None else format_bytes(least)
    lines = [f"depends on data: allocated {low} to {format_bytes(most)}, by what is selected at"]
    return lines + [f"  {where}" for where in found.bounded[:_MOST_BOUNDS]]


_MOST_BOUNDS = 6


def _parts(found: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"at the peak ({found.peak_phase}, {found.peak_op})")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    total = sum(found.by_category.values()) or 1
    for name, size in found.by_category.items():
        table.add_row(name, format_bytes(size), f"{100 * size / total:.1f} %")
    return table


def _fits(found: Estimate) -> list[str]:
    lines = []
    named = found.fits_named
    if named is not None:
        words = {"yes": "fits", "tight": "fits only just (the allocator must retry)", "no": "does not fit"}
        lines.append(f"{words[named.verdict]} on {named.name} ({format_bytes(named.memory_bytes)})")
    if found.fits:
        good = [fit.name for fit in found.fits if fit.verdict != "no"]
        lines.append(
            f"fits {len(good)} of {len(found.fits)} common GPUs" + (f": {', '.join(good)}" if good else "")
        )
    return lines


def _modules(found: Estimate, most: int = 20) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("at the peak, born in")
    table.add_column("bytes", justify="right", no_wrap=True)
    for name, size in list(found.by_module.items())[:most]:
        table.add_row(name, format_bytes(size))
    return table


def _policies(found: Estimate) -> Table:
    from memopt.estimators.recording import POLICIES

    table = Table(box=None, pad_edge=False)
    for title in ("category", "allocated", "released"):
        table.add_column(title)
    for name in found.by_category:
        policy = POLICIES.get(name)
        if policy:
            table.add_row(name, policy.allocation, policy.release)
    return table
