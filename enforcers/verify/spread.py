"""A script that does not repeat by itself: is the run under a plan further from its plain runs than those are from each other?

Nothing can be said of bits there. Losses are compared as numbers.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

Lines = list[dict[str, Any]]
"""What a run told of each iteration: digests of its losses, and their values."""


def beside_the_spread(enforced: Lines, plains: list[Lines]) -> str:
    """How far the enforced run's losses are from the plain runs', beside how far those are from each other."""
    spread = max(_apart_by(a, b) for a, b in combinations(plains, 2))
    away = min(_apart_by(enforced, plain) for plain in plains)
    verdict = "within" if away <= spread else "outside of"
    return f"the enforced run's losses are {verdict} the plain runs' spread ({away:.1e} away, plain runs {spread:.1e} apart)"


def _apart_by(a: Lines, b: Lines) -> float:
    """The largest difference of two losses of the same name and iteration, as a part of the larger; infinite where one is no number."""
    apart = 0.0
    for left, right in zip(a, b, strict=False):
        for name in left["losses"]:
            x, y = (float(each["values"].get(name, 0.0)) for each in (left, right))
            if x != y and left["losses"][name] != right["losses"].get(name):
                relative = abs(x - y) / max(abs(x), abs(y))
                apart = max(apart, relative if math.isfinite(relative) else math.inf)
    return apart
