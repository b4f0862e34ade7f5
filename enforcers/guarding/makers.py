"""Which node of backward has made what: for sums that autograd forms in place, but not while a mode watches."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from memopt.instrument.ops import is_plain, tensors_in
from memopt.instrument.torch_internals import current_node, storage_of


class Makers:
    """By the storages' addresses, for as long as they live."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def made(self, out: Any) -> None:
        """The node at work has made `out`."""
        node = current_node()
        if node is None:
            return
        number = node._sequence_nr()
        for tensor in tensors_in((out,)):
            if is_plain(tensor):
                storage = storage_of(tensor)
                self._made[storage._cdata] = weakref.ref(storage), number

    def of(self, tensor: Tensor) -> int | None:
        """The number of the node that made it; None where it is not known."""
        storage = storage_of(tensor)
        known = self._made.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else None

    def forget(self) -> None:
        """Backward is over."""
        self._made.clear()
