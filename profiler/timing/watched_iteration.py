"""An iteration watched as a plan's is, in which nothing is done: what it takes more than a plain one is what any plan costs at least."""

from __future__ import annotations

from typing import Any

from memopt.instrument import modes
from memopt.instrument.as_plain import as_plain
from memopt.instrument.frames import Frames
from memopt.instrument.ops import kind_of
from memopt.instrument.saved import Kept, SavedTensorHooks


class WatchedIteration:
    """Between `begin` and `end`, calls of modules, saved tensors and, but in backward, ops pass memopt's code."""

    def __init__(self, frames: Frames) -> None:
        """`frames` watches no calls now."""
        self._frames = frames
        self._hooks = SavedTensorHooks(Kept, Kept.get)
        self._mode = _Seeing()

    def begin(self) -> bool:
        """False where this cannot be: the script has hooks of its own here, has compiled a region, or trains in another thread."""
        if self._frames.regions.has_compiled or not self._frames.thread.is_here or not self._hooks.install():
            return False
        self._frames.watch_calls()
        modes.enter(self._mode)
        return True

    def backward_begins(self) -> None:
        modes.leave(self._mode)

    def backward_ended(self) -> None:
        modes.enter(self._mode)

    def end(self) -> None:
        """At the end of the iteration, or wherever a script leaves it."""
        modes.leave(self._mode)
        self._hooks.remove()
        self._frames.forget_calls()
        self._frames.paused = False
        self._frames.new_iteration()


class _Seeing(modes.Mode):
    """Looks at each op, and runs it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = as_plain(func)
        kind_of(func)
        return run(*args, **kwargs)
