"""What a planner decides about one storage, in the terms that the simulator prices."""

from __future__ import annotations

from typing import Literal

import msgspec

from memopt.codecs.table import is_of_values


class Decision(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One storage's fate between forward and backward. `keep` is the absence of a decision."""

    kind: Literal["swap", "recompute", "compress", "drop"]
    tier: Literal["host", "disk"] | None = None
    again: bool = False
    """Of a recompute: when it is made on the way to another tensor it is let go, and made again for its own consumers."""
    early: bool = False
    """Of a recompute: made while what it is made of is still there (`TraceView.early`), not when its own consumer asks."""
    each: bool = False
    """Of a recompute: made again for each that asks (`Saved.parts`), and held for none of the others."""
    prefetch_op: int = -1
    """The swap-in starts when this op starts; -1: when the storage is asked for."""
    codec: str = ""
    encoded_bytes: int = 0
    """What a codec holds; of a swap (only of `cdma`'s what-if): what passes the link, where that is not the whole storage."""
    transient_bytes: int = 0
    """Most that encoding holds besides the tensor and the encoded form."""
    decoded_bytes: int = 0
    """What one consumer gets handed back."""
    encode_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def is_source(self) -> bool:
        """Can a replay read the tensor while it is held like this? From a codec that gives back the values of the storage."""
        return is_of_values(self.codec)


RECOMPUTE = Decision(kind="recompute")
RECOMPUTE_AGAIN = Decision(kind="recompute", again=True)
RECOMPUTE_EACH = Decision(kind="recompute", each=True)
RECOMPUTE_EARLY = Decision(kind="recompute", early=True)
