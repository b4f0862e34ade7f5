"""Where the guard had nothing left to move and the budget was passed: by how much, before which op, and what was there."""

from __future__ import annotations

import time

from memopt.enforcers.guarding.what_is_there import largest, what_is_there
from memopt.instrument.frames import Frames
from memopt.units import format_bytes

_FAR_MORE = 1.25
_LONG_S = 0.1
"""A look at what is there that took longer is the last until this many times as long has gone by: where a graph has a hundred thousand
nodes one takes seconds."""
_RARELY = 20


class Passed:
    """Of one run."""

    def __init__(self, frames: Frames, device: str) -> None:
        self._frames, self._device = frames, device
        self.most_bytes = 0
        """Above the budget, at most."""
        self.now_bytes = self.now_training_bytes = 0
        """In this iteration; the second where a graph is made, in backward or in a step: not where the script evaluates."""
        self.first_step_bytes = 0
        """In the first iteration, once backward is over: the step makes the optimizer's state, and later ones may be taken another way. No figure
        of iterations to come, and not counted above."""
        self._is_first = True
        self._need_bytes = self._told_bytes = 0
        self._held = ""
        """What there was then."""
        self._not_before = 0.0
        """Is looked for it again."""
        self._at = ""
        """The op before which that was, and where."""

    def new_iteration(self) -> None:
        self.now_bytes = self.now_training_bytes = self.first_step_bytes = 0
        self._is_first = False

    def by(
        self, over_bytes: int, need_bytes: int, what: str, *, trains: bool, after_backward: bool = False
    ) -> None:
        """The budget is passed by so much, as `what` takes `need_bytes`; not passed, where that is 0 or less."""
        if after_backward and self._is_first:
            self.first_step_bytes = max(self.first_step_bytes, over_bytes)
        else:
            self.now_bytes = max(self.now_bytes, over_bytes)
            if trains:
                self.now_training_bytes = max(self.now_training_bytes, over_bytes)
        if over_bytes > self.most_bytes:
            where = self._frames.current.path
            self._at = f"{what} in {where}" if where else what
            self.most_bytes, self._need_bytes = over_bytes, need_bytes
            self._look_what_is_there()

    def _look_what_is_there(self) -> None:
        """At the first time that the budget is passed, and when it is passed by far more: it takes long."""
        began = time.monotonic()
        if self.most_bytes > _FAR_MORE * self._told_bytes and began >= self._not_before:
            self._told_bytes = self.most_bytes
            self._held = largest(what_is_there(self._frames, self._device))
            took = time.monotonic() - began
            self._not_before = began + _RARELY * took if took > _LONG_S else 0.0

    @property
    def words(self) -> str:
        """Where that was the furthest; empty where the budget was held."""
        if not self.most_bytes:
            return ""
        takes = f", which takes {format_bytes(self._need_bytes)}," if self._need_bytes else ""
        held = f": {self._held}" if self._held else ""
        return f"before {self._at}{takes} nothing was left that could be moved{held}"
