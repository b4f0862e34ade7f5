"""What the device holds, in a few words: for an outcome that has to say what stood in a budget's way, or what a script has kept."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Mapping

from torch import Tensor

from memopt.instrument.frames import Frames
from memopt.instrument.identity import parts_of
from memopt.instrument.memory.meter import living_storages, storage_on
from memopt.instrument.torch_internals import DisableTorchDispatch
from memopt.profiler.known import There, tell_all, there_now
from memopt.trace import LEFT_OVER
from memopt.units import format_bytes

log = logging.getLogger(__name__)

GRADIENTS = "gradients"
_TOGETHER = {"parameter": "parameters", "buffer": "buffers", "gradient": GRADIENTS}
"""Categories whose tensors are told as one, and how."""
_STATE = "optimizer state"
UNNAMED = "tensors that no variable names"
_MOST = 3
_SMALL = 20
"""Times smaller than the largest: not worth a word."""


def what_is_there(frames: Frames, device: str, there: There | None = None) -> dict[str, int]:
    """Bytes on `device` by what they are: parameters, gradients, the parts of an optimizer's state, variables. Each storage once. `there`: what
    lives, where it has just been looked for.

    They are for words alone: where something that the script holds cannot be looked at, what was found so far is given."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def tell(tensor: Tensor, category: str, name: str) -> None:
        for storage in [storage_on(part, device) for part in parts_of(tensor)]:
            if storage is not None and storage._cdata not in seen:
                seen.add(storage._cdata)
                what = _words(category, name)
                found[what] = found.get(what, 0) + storage.nbytes()

    guard = DisableTorchDispatch()
    try:
        tell_all(tell, frames, there or there_now())
    except Exception:
        log.info("what the device holds could not be told", exc_info=True)
    finally:
        del guard
    return found


def _words(category: str, name: str) -> str:
    if category == _STATE:
        return f"{_STATE} ({name.partition(' of ')[0]})"
    if name == LEFT_OVER:
        return UNNAMED
    return _TOGETHER.get(category, re.sub(r"\d+", "#", name))


def largest(found: Mapping[str, int]) -> str:
    """The largest of them, as `parameters 1.23 MiB, variable x 512 KiB`; empty where there is nothing."""
    least = max(found.values(), default=0) / _SMALL
    ordered = sorted(((size, what) for what, size in found.items() if size > least), reverse=True)
    return ", ".join(f"{what} {format_bytes(size)}" for size, what in ordered[:_MOST])


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What there is more of `now`, the largest first."""
    more = {what: size - before.get(what, 0) for what, size in now.items()}
    return largest(more) if sum(more.values()) > _SMALL else ""


def freed_by_collecting(device: str) -> int:
    """Bytes on `device` that were in reference cycles which nothing reaches any more; they are gone now."""
    before = sum(storage.nbytes() for storage in living_storages(device))
    gc.collect()
    return before - sum(storage.nbytes() for storage in living_storages(device))
