"""Numbers on the command line: a range that not a number is outside of."""

from __future__ import annotations

import math
from typing import Any

import click


class Real(click.FloatRange):
    """`click.FloatRange`, which lets `nan` through: no comparison with a limit is true of it. Infinity is refused too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
