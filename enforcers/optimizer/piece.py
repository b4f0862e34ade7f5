"""A piece of an optimizer's parameters: its state in one bundle of bytes, and the bundle's way to a tier and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from memopt.enforcers.tiers.swap import Pending, SwapFailed, SwapTier, without_frames
from memopt.instrument.stepping.in_pieces import Segment

_ALIGNED = 64
"""Bytes at whose multiples rows of a bundle begin: a line of the cache, which the size of every data type divides."""


@dataclass(slots=True, eq=False)
class Piece:
    """Segments that are stepped at once."""

    segments: list[Segment]
    entries: list[tuple[int, str, torch.dtype, int]] = field(default_factory=list)
    """(segment, name, data type, first byte) of what lies in its bundle."""
    bundle: UntypedStorage | None = None
    """Its state while it is on the device."""
    ticket: Any = None
    last: Any = None
    """Its ticket of the step before: pinned memory that it takes again, where another place would have to be pinned first."""
    coming: Pending | None = None

    @property
    def is_empty(self) -> bool:
        return self.bundle is None and self.ticket is None

    def rows(self) -> dict[tuple[int, str], Tensor]:
        """What lies in the bundle, as rows over its bytes."""
        assert self.bundle is not None
        found = {}
        for number, name, dtype, begin in self.entries:
            whole = torch.empty(0, dtype=dtype, device=self.bundle.device)
            found[number, name] = whole.set_(
                self.bundle, begin // dtype.itemsize, (self.segments[number].numel,), (1,)
            )
        return found

    def lay(self, rows: dict[tuple[int, str], Tensor]) -> None:
        """Copy `rows` into one storage, which is its bundle from here on."""
        begin, entries = 0, []
        for (number, name), row in rows.items():
            entries.append((number, name, row.dtype, begin))
            begin += -(-row.nbytes // _ALIGNED) * _ALIGNED
        device = next(iter(rows.values())).device
        self.bundle, self.entries = UntypedStorage(begin, device=device), entries
        for key, row in self.rows().items():
            row.copy_(rows[key])


class Pager:
    """Takes bundles to a tier and brings them back; without a tier they stay where they are."""

    def __init__(self, tier: SwapTier[Any] | None) -> None:
        self._tier = tier

    def fetch(self, piece: Piece) -> None:
        """Start to bring it."""
        if self._tier is None or piece.ticket is None or piece.coming is not None:
            return
        held = self._tier.take_back(piece.ticket)
        if held is not None:
            piece.bundle, piece.last, piece.ticket = held, piece.ticket, None
            return
        piece.bundle = UntypedStorage(piece.ticket.nbytes, device=piece.ticket.device)
        piece.coming = self._tier.read_async(piece.ticket, piece.bundle)

    def arrive(self, piece: Piece) -> None:
        """Wait until it is here."""
        if piece.coming is not None:
            piece.coming.result()
            piece.last, piece.coming, piece.ticket = piece.ticket, None, None

    def leave(self, piece: Piece) -> None:
        """Start to send it away."""
        if self._tier is None or piece.bundle is None:
            return
        try:
            piece.ticket = self._tier.write_async(piece.bundle, piece.last)
        except SwapFailed as error:
            without_frames(error)
            return
        piece.bundle = piece.last = None

    def gone(self, piece: Piece) -> None:
        """Wait until the copy is safe; where it cannot be made, the state stays here."""
        if self._tier is None or piece.ticket is None:
            return
        try:
            self._tier.wait(piece.ticket)
        except SwapFailed as error:
            without_frames(error)
            piece.bundle = self._tier.take_back(piece.ticket)
            piece.ticket = None

    def all_gone(self, pieces: list[Piece]) -> None:
        """Wait for the last of `pieces`: those before it have been waited for."""
        if pieces:
            self.gone(pieces[-1])
        if self._tier is not None:
            self._tier.collect()
