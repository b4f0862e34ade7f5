"""What the guard knows of saved tensors: the handles that autograd holds, and the storages that these lie in."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from memopt.enforcers.guarding.live_bytes import Live
from memopt.enforcers.tiers.swap import Pending
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.instrument.saved import Kept
from memopt.instrument.torch_internals import storage_of, storage_use_count


class Watched(Kept):
    """A saved tensor that the guard may send away."""

    __slots__ = ("size_bytes",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.size_bytes = storage_of(tensor).nbytes()


@dataclass(slots=True, eq=False)
class Saved:
    """A storage that autograd has saved, and the handles on it."""

    address: int
    size_bytes: int
    handles: list[weakref.ref[Watched]] = field(default_factory=list)
    away: weakref.ref[SwappedStorage] | None = None

    @property
    def is_held_by_others(self) -> bool:
        """Surely, without looking at each handle: asked before each op, where a script saves one storage hundreds of times."""
        if self.away is not None:
            return False
        first = self.handles[0]()  # while it lives, the address is this storage's
        return first is not None and storage_use_count(self.address) > len(self.handles) + 1

    @property
    def lives(self) -> bool:
        """Is any of the handles still there? Asked as each tensor is saved: the last one most likely is."""
        return self.handles[-1]() is not None or any(
            reference() is not None for reference in reversed(self.handles)
        )

    def living(self) -> list[Watched]:
        """The handles that are still there; the others are forgotten, but for one."""
        found = [handle for reference in self.handles if (handle := reference()) is not None]
        if 0 < len(found) < len(self.handles):
            self.handles = [weakref.ref(handle) for handle in found]
        return found


class Use:
    """Counts a storage that has come back, whoever asked."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.content: weakref.ref[SwappedStorage] | None = None

    def begins(self) -> None: ...

    def wait(self, arrival: Pending) -> None:
        arrival.result()
        content = self.content() if self.content is not None else None
        if content is not None and content.here is not None:
            self._live.met(content.here)
