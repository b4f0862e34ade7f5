"""`memopt advise --pareto`: plans for budgets from 90 % down, and the curve of peak against step time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memopt.cli.advise.setting import setting_of, tell_lints
from memopt.cli.requests import AdviseRequest

if TYPE_CHECKING:
    from memopt.advisors.frontier import Point


def pareto(request: AdviseRequest) -> int:
    """Plan at each budget, write the curve, show it; gives the exit code."""
    from memopt.advisors.frontier import SHARES, frontier, without_dominated
    from memopt.cli.advise.tables import pareto_figures, pareto_table
    from memopt.cli.shared.console import out, progress, say
    from memopt.files import write_atomic
    from memopt.reports.formats.summary import encode

    setting = setting_of(request, "pareto")
    adviser = setting.adviser
    points: list[Point] = []
    with progress("planning for budgets from 90 % down", total=len(SHARES), unit="point") as step:
        for point in frontier(adviser, (request.strategies or ("auto",))[0]):
            points.append(point)
            step(1)
    points = without_dominated(points)
    figures = pareto_figures(points, adviser.unplanned_peak_bytes, adviser.trace.script) | setting.figures()
    write_atomic(setting.output, encode(figures).encode() + b"\n")
    if request.as_json:
        click.echo(encode(figures))
    else:
        out().print(pareto_table(points, adviser.unplanned_peak_bytes))
        tell_lints(setting.lints, out())
    say(f"wrote {setting.output}")
    return 0
