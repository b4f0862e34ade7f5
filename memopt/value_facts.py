"""What a profile found of the values of a saved storage, for codecs whose size depends on them. A table of `Trace`."""

from __future__ import annotations

import msgspec


class ValueFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one storage, in the recorded iteration. Other iterations have other values: who plans by these leaves a margin."""

    storage: int
    dtype: str
    """As which its elements were read; as torch spells it."""
    nonzero_share: float = 1.0
    """Of its elements, those that have a bit set: -0.0 counts. 1: all or nearly all."""
    low: int | None = None
    """The smallest integer; none: they are no integers."""
    high: int | None = None
    exact_as: str = ""
    """A type of half the bytes that holds each of its floats exactly; empty: none was found."""

    @property
    def problem(self) -> str:
        """What cannot be so; empty where all can."""
        if not 0 <= self.nonzero_share <= 1:
            return f"{self.nonzero_share} of its elements are not zero"
        if (self.low is None) != (self.high is None) or (self.low or 0) > (self.high or 0):
            return f"its integers lie between {self.low} and {self.high}"
        return ""
