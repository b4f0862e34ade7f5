"""What each storage is, where nobody could tell for sure while it lived: input, activation, temporary, optimizer state."""

from __future__ import annotations

from itertools import accumulate

from memopt.profiler.recorder import Recorder
from memopt.profiler.rows import BACKWARD, FORWARD, OPTIMIZER, StorageRow


def categories(recorder: Recorder) -> list[str]:
    """The category of every storage of `recorder`."""
    last_backward = list(
        accumulate(
            (op if row.phase == BACKWARD else -1 for op, row in enumerate(recorder.ops)), max, initial=-1
        )
    )
    saved = {slot.storage for slot in recorder.slots}
    found: list[str] = []
    for number, row in enumerate(recorder.storages):
        found.append(row.category or _worked_out(recorder, row, number in saved, last_backward, found))
    return found


def _worked_out(
    recorder: Recorder, row: StorageRow, saved: bool, last_backward: list[int], known: list[str]
) -> str:
    if row.birth < 0 or row.found:
        return "input"
    birth = recorder.ops[row.birth]
    if birth.phase == OPTIMIZER:
        return "optimizer state" if row.death is None else "temporary"
    if birth.phase == BACKWARD:
        return "temporary"
    if birth.phase == FORWARD and _is_input(recorder, row, known):
        return "input"
    end = len(recorder.ops) if row.death is None else row.death + 1
    meets_backward = last_backward[min(end, len(recorder.ops))] > row.birth
    return "activation" if saved or meets_backward else "temporary"


def _is_input(recorder: Recorder, row: StorageRow, known: list[str]) -> bool:
    """Was it made outside any module from nothing, or, before the first module ran, from inputs alone?"""
    birth = recorder.ops[row.birth]
    if not birth.module.startswith("@"):
        return False
    sources = {recorder.values[value][0] for value in birth.reads}
    if not sources:
        return True
    return birth.module == "@" and all(source < len(known) and known[source] == "input" for source in sources)
