"""How a script ended, in words, and what was on the device at that moment if nothing was being recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.profiler.recorder import Recorder

TOO_FEW_ITERATIONS = "the script ended before the iteration that was to be recorded"
"""Why a profile is partial."""
MADE_ONLY = "the script made "
"""Begin of the note in a profile that is of another iteration than was asked for."""

_ALLOCATION_FAILED = ("out of memory", "can't allocate memory", "not enough memory")


def in_words(error: BaseException) -> str:
    """One line on why the script ended: `the script raised ValueError: ...`."""
    if isinstance(error, KeyboardInterrupt):
        return "the script was interrupted"
    text = " ".join(str(error).split())
    kind = type(error).__name__
    verb = "ran out of memory" if is_out_of_memory(error) else "raised"
    return f"the script {verb}: {kind}: {text}"[:500] if text else f"the script {verb}: {kind}"


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation of host or device memory fail?"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _ALLOCATION_FAILED)


def made_only(made: int, iteration: int) -> str:
    """What to say of a profile that is not of the iteration that was asked for."""
    times = "1 iteration" if made == 1 else f"{made} iterations"
    first = ": what the optimizer keeps was made in it" if iteration == 1 else ""
    return f"{MADE_ONLY}{times} only, and this is number {iteration}{first}"


def know_what_is_saved(recorder: Recorder) -> None:
    """Tell `recorder` of the tensors that autograd holds through hooks that recorded nothing."""
    from memopt.instrument.live_objects import living
    from memopt.instrument.saved import Kept

    for thing in living(Kept)[0]:
        if type(thing) is Kept:
            recorder.met.know(thing.tensor, "activation", "saved for backward")
