"""The codecs: a row each, without torch. Which there are, whom they serve, and what is said of them in a plan.

How they encode: `enforcers/codecs/`. What they hold and need: `estimators/simulator/codec_sizes.py`. A codec of which nothing is
known before the run is planned for by nobody yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Codec:
    """One exact form of a saved tensor that is smaller than itself."""

    name: str
    words: str
    """Why it is enough, for a person who reads the plan."""
    of_values: bool = False
    """It holds a whole storage, for any reader; the others serve one backward formula."""


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("nothing", "its values are never read"),
        Codec("predicate", "backward asks one yes-or-no question of each element, so one bit is held"),
        Codec("pool_index", "an index inside its pooling window is all that backward needs"),
        Codec("two_valued", "dropout noise has two values, so one bit an element is held", of_values=True),
        Codec("narrow_int", "its integers fit a narrower type", of_values=True),
        Codec(
            "exact_cast", "its values came from a narrower type, and go back to it exactly", of_values=True
        ),
        Codec(
            "zero_bitmap",
            "most of it is zero, so the other values and a bit an element are held",
            of_values=True,
        ),
    )
}
