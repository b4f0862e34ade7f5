"""Weights that leave after a call which some iterations do not make: a target network that acts in most of them. There they leave as the
call begins that came after it elsewhere."""

from __future__ import annotations

from memopt.instrument.frames import Frame


class Uncalled:
    """Told, in each iteration, of weights that leave, and of calls that begin."""

    def __init__(self) -> None:
        self._before: dict[str, set[int]] = {}
        """By outermost call: actions that it has found taken."""
        self._left: dict[int, str] = {}
        """In this iteration: after which outermost call each has left."""
        self._found: set[int] = set()
        """Of those, what another call than theirs has found taken."""
        self._call = ""
        """The last that has begun."""

    def left(self, action: int, frame: Frame) -> None:
        """Its weight leaves now."""
        self._left.setdefault(action, frame.outermost_call)

    def begins(self, frame: Frame) -> list[int]:
        """There is a first op in `frame`: which actions are to be taken now, as the call that they wait for is not made?"""
        call = frame.outermost_call
        if not call or frame.without_gradients or call == self._call:
            return []
        self._call = call
        before = self._before.setdefault(call, set())
        for action, own in self._left.items():
            if own != call and action not in self._found:
                self._found.add(action)
                before.add(action)
        return [action for action in before if action not in self._left]

    def new_iteration(self) -> None:
        self._left.clear()
        self._found.clear()
        self._call = ""
