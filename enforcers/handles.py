"""What autograd holds instead of the tensors that it saved."""

from __future__ import annotations

from torch import Tensor, UntypedStorage

from memopt.enforcers.codecs.encoded import Encoded
from memopt.enforcers.lookup import PlannedSlot
from memopt.enforcers.records import Value
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.instrument.saved import Place, share


class Planned:
    """What autograd holds instead of a planned tensor."""

    __slots__ = (
        "__weakref__",
        "content",
        "place",
        "served",
        "slot",
        "tensor",
        "version",
        "witness",
    )

    def __init__(self, tensor: Tensor, slot: PlannedSlot) -> None:
        self.slot = slot
        self.tensor: Tensor | None = share(tensor)
        """Held until its action has been taken, and for good when it could not be."""
        self.witness: Tensor | None = None
        """Shares the version counter of what was saved, but none of its bytes."""
        self.version = tensor._version
        self.place = Place.of(tensor)
        self.content: Value | SwappedStorage | Encoded | None = None
        self.served = False

    def on(self, storage: UntypedStorage) -> Tensor:
        return self.place.on(storage)
