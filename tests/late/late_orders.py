"""Every order in which the streams of a small plan can run, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from tests.late.late_device import LateEvent, LateStream, Mark, World


class ChosenOrder(World):
    """Goes on only when the host asks or waits; every choice that it then has is the next of `path`, or the first."""

    def __init__(self, path: list[int]) -> None:
        self._path = path
        self.choices: list[tuple[int, int]] = []
        """(what was chosen, of how many)."""
        super().__init__()

    def choose(self, count: int) -> int:
        if count == 1:
            return 0
        place = len(self.choices)
        chosen = self._path[place] if place < len(self._path) else 0
        self.choices.append((chosen, count))
        return chosen

    def seed(self, seed: int) -> None:
        super().seed(0)

    def go_on(self) -> None:
        """Not by itself."""

    def asked(self, event: LateEvent) -> bool:
        """Before it came to pass, or after."""
        with self.lock:
            if not self.choose(2):
                return False
            self.waited_for(event)
            return True

    def turn(self) -> bool:
        """One stream goes on, past one thing that touches bytes. The points between such things touch none: they pass at once."""
        if any(self._passes_a_point(stream) for stream in self.ranks):
            return True
        ready = [stream for stream in self.ranks if stream.work and not isinstance(stream.work[0], LateEvent)]
        return bool(ready) and self.step(ready[self.choose(len(ready))])

    def _passes_a_point(self, stream: LateStream) -> bool:
        first = stream.work[0] if stream.work else None
        if isinstance(first, Mark) or (isinstance(first, LateEvent) and first.passed):
            return self.step(stream)
        return False


def every_order(most: int) -> Iterator[ChosenOrder]:
    """A world for each order of what is done with it, `most` at most."""
    path: list[int] = []
    for _ in range(most):
        world = ChosenOrder(path)
        yield world
        path = [chosen for chosen, _ in world.choices]
        counts = [count for _, count in world.choices]
        while path and path[-1] == counts[len(path) - 1] - 1:
            path.pop()
        if not path:
            return
        path[-1] += 1
